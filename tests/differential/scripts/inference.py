"""Models larger than memory: empty weights, device maps, offload, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..registry import Observer, script


class Block(nn.Module):
    """A layer that must not be split."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, inputs: Any) -> Any:
        return inputs + self.outer(torch.relu(self.inner(inputs)))


class Tower(nn.Module):
    """Blocks, a buffer and a head that may be tied to the embedding."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 20, bias=False)
        self.register_buffer("scale", torch.tensor(2.0))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Any) -> Any:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden)) * self.scale


def tower(tied: bool = False) -> Tower:
    """Return it with the same weights everywhere."""
    torch.manual_seed(0)
    return Tower(tied)


TOKENS = torch.arange(6).reshape(2, 3)


@script("one")
def empty_weights(observe: Observer) -> None:
    from accelerate import init_empty_weights, init_on_device

    for buffers in (None, False, True):
        with init_empty_weights(include_buffers=buffers):
            model = Tower()
        observe(devices=sorted({str(tensor.device) for tensor in model.parameters()}), buffer=model.scale.device)
    with init_on_device(torch.device("meta")):
        observe(tensor=nn.Linear(2, 2).weight.device)
    observe(after=nn.Linear(2, 2).weight.device)


@script("one")
def device_maps(observe: Observer) -> None:
    from accelerate import infer_auto_device_map, init_empty_weights

    with init_empty_weights():
        model, tied = Tower(), Tower(tied=True)
    for budget in (
        {0: 1500, "cpu": 10_000},
        {0: 2000, 1: 2000, "cpu": 10_000},
        {"cpu": 1500, "disk": 10_000},
        {0: 700, "cpu": 700},
        {0: "100KB"},
        {0: 4000, "cpu": 10_000},
    ):
        name = "-".join(f"{key}:{value}" for key, value in budget.items())
        for options in ({}, {"no_split_module_classes": ["Block"]}, {"dtype": torch.float16}):
            label = f"{name} {' '.join(options)}"
            observe(**{label: infer_auto_device_map(model, max_memory=dict(budget), **options)})  # type: ignore[arg-type]
        observe(**{f"{name} tied": infer_auto_device_map(tied, max_memory=dict(budget))})  # type: ignore[arg-type]


@script("one")
def module_sizes(observe: Observer) -> None:
    from accelerate.utils import (
        calculate_maximum_sizes,
        compute_module_sizes,
        dtype_byte_size,
        find_tied_parameters,
        get_max_layer_size,
        named_module_tensors,
    )

    model = tower(tied=True)
    observe(sizes=dict(compute_module_sizes(model)), half=dict(compute_module_sizes(model, dtype=torch.float16)))
    observe(special=dict(compute_module_sizes(tower(), special_dtypes={"head.weight": torch.float16})))
    observe(tied=[sorted(group) for group in find_tied_parameters(model)], none=find_tied_parameters(tower()))
    observe(tensors=sorted(name for name, _ in named_module_tensors(model, recurse=True)))
    observe(direct=sorted(name for name, _ in named_module_tensors(model)))
    observe(largest=get_max_layer_size(list(model.named_children()), compute_module_sizes(model), ["Block"]))
    observe(maximum=calculate_maximum_sizes(tower()))
    observe(bytes=[float(dtype_byte_size(kind)) for kind in (torch.float32, torch.int8, torch.bool, torch.bfloat16)])


@script("one")
def offload_to_the_host(observe: Observer) -> None:
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    model = tower()
    expected = model(TOKENS)
    cpu_offload(model, execution_device="cpu")
    observe(output=model(TOKENS), same=torch.equal(model(TOKENS), expected), device=model.head.weight.device)
    observe(hooked=hasattr(model.head, "_hf_hook"))
    remove_hook_from_submodules(model)
    observe(unhooked=hasattr(model.head, "_hf_hook"), back=model.head.weight.device)


@script("one")
def offload_to_disk(observe: Observer) -> None:
    from accelerate import disk_offload

    model = tower()
    expected = model(TOKENS)
    disk_offload(model, "weights", execution_device="cpu")
    observe(same=torch.equal(model(TOKENS), expected), device=model.head.weight.device)
    observe.files("weights")


@script("one")
def model_dispatched(observe: Observer) -> None:
    from accelerate import dispatch_model

    model = tower()
    expected = model(TOKENS)
    places = {"embedding": "cpu", "blocks.0": "disk", "blocks.1": "cpu", "blocks.2": "disk", "norm": "cpu"}
    model = dispatch_model(model, {**places, "head": "disk", "scale": "cpu"}, main_device="cpu", offload_dir="away")
    observe(same=torch.allclose(model(TOKENS), expected), map=model.hf_device_map)
    observe(devices={name: parameter.device for name, parameter in model.named_parameters()})
    observe.files("away")
    observe.raises("map with holes", dispatch_model, tower(), {"embedding": "cpu"})


@script("one")
def checkpoint_loaded_and_dispatched(observe: Observer) -> None:
    from accelerate import Accelerator, init_empty_weights, load_checkpoint_and_dispatch

    expected = tower()
    Accelerator().save_model(expected, "saved", max_shard_size="1KB")
    for device_map in (
        {"": "cpu"},
        {"embedding": "cpu", "blocks": "disk", "norm": "cpu", "head": "disk", "scale": "cpu"},
    ):
        with init_empty_weights():
            model = Tower()
        model = load_checkpoint_and_dispatch(model, "saved", device_map=device_map, offload_folder="away")
        observe(same=torch.allclose(model(TOKENS), expected(TOKENS)))
    with init_empty_weights():
        model = Tower()
    half = load_checkpoint_and_dispatch(model, "saved", device_map={"": "cpu"}, dtype=torch.bfloat16)
    observe(half=half.head.weight.dtype, output=half(TOKENS))
    observe.raises("nothing there", load_checkpoint_and_dispatch, Tower(), "nowhere", device_map={"": "cpu"})


@script("one")
def checkpoint_that_does_not_fit(observe: Observer) -> None:
    from safetensors.torch import save_file

    from accelerate import load_checkpoint_in_model

    save_file({"weight": torch.ones(2, 2), "surplus": torch.ones(1)}, "one.safetensors")
    model = nn.Linear(2, 2)
    load_checkpoint_in_model(model, "one.safetensors")
    observe(weight=model.weight)
    observe.raises("strict", load_checkpoint_in_model, nn.Linear(2, 2), "one.safetensors", strict=True)
    observe.raises("shape", load_checkpoint_in_model, nn.Linear(3, 2), "one.safetensors")


@script("one")
def hooks_on_modules(observe: Observer) -> None:
    from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module, remove_hook_from_module

    class Add(ModelHook):
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            return (args[0] + 1,), kwargs

        def post_forward(self, module: Any, output: Any) -> Any:
            return output * 10

    module = nn.Identity()
    add_hook_to_module(module, Add())
    observe(once=module(torch.ones(1)))
    add_hook_to_module(module, Add())
    observe(replaced=module(torch.ones(1)))
    add_hook_to_module(module, Add(), append=True)
    observe(appended=module(torch.ones(1)), kind=type(module._hf_hook).__name__)
    remove_hook_from_module(module)
    observe(removed=module(torch.ones(1)), left=hasattr(module, "_hf_hook"))
    add_hook_to_module(module, SequentialHook(Add(), Add()))
    observe(sequence=module(torch.ones(1)))


@script("one")
def offload_with_hooks_between_models(observe: Observer) -> None:
    from accelerate import cpu_offload_with_hook

    first, hook = cpu_offload_with_hook(nn.Linear(2, 2), "cpu")
    second, other = cpu_offload_with_hook(nn.Linear(2, 2), "cpu", prev_module_hook=hook)
    observe(shape=list(second(first(torch.ones(1, 2))).shape))
    other.offload()
    other.remove()
    observe(left=hasattr(second, "_hf_hook"), kept=hasattr(first, "_hf_hook"))


@script("one")
def layerwise_casting(observe: Observer) -> None:
    from accelerate.big_modeling import attach_layerwise_casting_hooks

    model = tower()
    attach_layerwise_casting_hooks(
        model, storage_dtype=torch.bfloat16, compute_dtype=torch.float32, skip_modules_pattern=["norm"]
    )
    observe(kinds={name: parameter.dtype for name, parameter in model.named_parameters()}, output=model(TOKENS))


@script("one")
def weights_offloaded_by_hand(observe: Observer) -> None:
    from accelerate.utils import OffloadedWeightsLoader, load_offloaded_weight, offload_state_dict, offload_weight

    index = offload_weight(torch.arange(4.0), "vector", ".", index={})
    index = offload_weight(torch.tensor(3.0), "scalar", ".", index=index)
    index = offload_weight(torch.ones(2, dtype=torch.bfloat16), "half", ".", index=index)
    observe(index=index)
    for name, info in index.items():
        observe(loaded=load_offloaded_weight(f"{name}.dat", info))
    offload_state_dict("folder", {"a": torch.ones(1), "b": torch.zeros(2)})
    observe.files("folder")
    loader = OffloadedWeightsLoader(state_dict={"c": torch.ones(1)}, save_folder="folder")
    observe(keys=sorted(loader), count=len(loader), b=loader["b"], c=loader["c"])
    observe(text=Path("folder/index.json").read_text())


@script("one")
def tensors_moved_one_by_one(observe: Observer) -> None:
    from accelerate.utils import check_tied_parameters_in_config, retie_parameters, set_module_tensor_to_device

    del check_tied_parameters_in_config
    model = nn.Linear(2, 2, device="meta")
    set_module_tensor_to_device(model, "weight", "cpu", value=torch.ones(2, 2))
    set_module_tensor_to_device(model, "bias", "cpu", value=torch.ones(2), dtype=torch.float16)
    observe(weight=model.weight, bias=model.bias, gradients=model.weight.requires_grad)
    observe.raises("no value", set_module_tensor_to_device, nn.Linear(2, 2, device="meta"), "weight", "cpu")
    observe.raises("no name", set_module_tensor_to_device, model, "nonsense", "cpu")
    observe.raises("shape", set_module_tensor_to_device, model, "weight", "cpu", value=torch.ones(3, 3))
    other = tower()
    retie_parameters(other, [["embedding.weight", "head.weight"]])
    observe(tied=other.head.weight is other.embedding.weight)
