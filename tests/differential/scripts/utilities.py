"""The pieces of `accelerate.utils` that scripts and libraries call by themselves."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch import nn

from ..registry import Observer, script


class Output(NamedTuple):
    """What models return."""

    loss: Any
    logits: Any


class Mapping(dict[str, Any]):
    """A dictionary with a method, like a tokenizer's output."""


def nested() -> Any:
    """Return a batch of every kind."""
    ones = torch.ones(2)
    return {
        "list": [ones, 3],
        "tuple": (ones, "text"),
        "named": Output(ones, ones),
        "map": Mapping(x=ones),
        "none": None,
    }


@script("one")
def nested_batches(observe: Observer) -> None:
    from accelerate.utils import (
        concatenate,
        convert_to_fp32,
        find_batch_size,
        find_device,
        get_data_structure,
        honor_type,
        initialize_tensors,
        recursively_apply,
        send_to_device,
        slice_tensors,
    )

    moved = send_to_device(nested(), "cpu")
    observe(moved=moved, kinds=[type(value).__name__ for value in moved.values()])
    skipped = send_to_device({"a": torch.ones(1), "b": torch.ones(1)}, "meta", skip_keys="b")
    observe(skipped={name: value.device for name, value in skipped.items()})
    observe(doubled=recursively_apply(lambda tensor: tensor * 2, nested()))
    observe.raises("other type", recursively_apply, lambda tensor: tensor, {"a": "text"}, error_on_other_type=True)
    observe(sliced=slice_tensors({"a": torch.arange(6), "b": [torch.arange(8).reshape(4, 2)]}, slice(0, 2)))
    observe(joined=concatenate([{"a": torch.ones(1)}, {"a": torch.zeros(2)}]))
    observe(columns=concatenate([torch.ones(1, 2), torch.zeros(1, 1)], dim=1))
    observe(size=find_batch_size({"a": [torch.ones(3, 2)]}), device=find_device([{"a": torch.ones(1)}]))
    observe.raises("no size", find_batch_size, {"a": "text"})
    observe(full=convert_to_fp32({"a": torch.ones(1, dtype=torch.float16), "b": torch.ones(1, dtype=torch.int64)}))
    observe(honoured=honor_type(Output(1, 2), iter([3, 4])), tuple=honor_type((1,), iter([2, 3])))
    structure = get_data_structure({"a": torch.ones(2, 3), "b": [torch.ones(1, dtype=torch.int64)]})
    observe(shape=list(structure["a"].shape), dtype=structure["b"][0].dtype)
    observe(empty=list(initialize_tensors(structure)["a"].shape))


@script("one")
def outputs_in_fp32(observe: Observer) -> None:
    from accelerate.utils import convert_outputs_to_fp32

    def forward(inputs: Any) -> Any:
        return {"half": inputs.half(), "whole": inputs.long(), "list": [inputs.bfloat16()]}

    wrapped = convert_outputs_to_fp32(forward)
    observe(output=wrapped(torch.ones(1)), name=getattr(wrapped, "__name__", None))


@script("one")
def small_helpers(observe: Observer) -> None:
    from accelerate.utils import (
        convert_bytes,
        get_pretty_name,
        is_port_in_use,
        merge_dicts,
        patch_environment,
        str_to_bool,
    )

    observe(words=[int(str_to_bool(word)) for word in ("yes", "True", "on", "1", "no", "OFF", "f", "0")])
    observe.raises("no word", str_to_bool, "maybe")
    observe(bytes=[convert_bytes(size) for size in (10, 2048, 5 * 1024**2, 3.5 * 1024**3)])
    observe(merged=merge_dicts({"a": {"b": 1}}, {"a": {"c": 2}, "d": 3}))
    observe(pretty=[get_pretty_name(thing) for thing in (nn.Linear, small_helpers)], port=is_port_in_use(1))
    os.environ["KEPT"] = "before"
    with patch_environment(kept="inside", new=3):
        observe(inside=[os.environ["KEPT"], os.environ["NEW"]])
    observe(after=[os.environ["KEPT"], os.environ.get("NEW")])


@script("one")
def environment_read(observe: Observer) -> None:
    from accelerate.utils import get_int_from_env, parse_choice_from_env, parse_flag_from_env

    os.environ |= {"FLAG": "yes", "NUMBER": "3", "CHOICE": "x"}
    observe(flag=bool(parse_flag_from_env("FLAG")), missing=bool(parse_flag_from_env("NO_FLAG", True)))
    observe(number=get_int_from_env(["NO_NUMBER", "NUMBER"], 7), default=get_int_from_env(["NO_NUMBER"], 7))
    observe(choice=parse_choice_from_env("CHOICE"), no_choice=parse_choice_from_env("NO_CHOICE", "y"))


@script("one")
def budgets(observe: Observer) -> None:
    from accelerate.utils.modeling import (
        clean_device_map,
        convert_file_size_to_int,
        get_balanced_memory,
        get_max_memory,
    )

    observe(sizes=[convert_file_size_to_int(size) for size in ("1GB", "2GiB", "30MB", "5KiB", "1.5GB", 77)])
    observe.raises("no size", convert_file_size_to_int, "many")
    observe(budget=get_max_memory({"cpu": "1MB"}), own=get_max_memory({0: 10, "cpu": 20}))
    observe(
        cleaned=clean_device_map({"a.x": 0, "a.y": 0, "b.x": 0, "b.y": 1}), whole=clean_device_map({"a": 0, "b": 0})
    )
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    observe(balanced=get_balanced_memory(model, max_memory={0: 2000, 1: 2000, "cpu": 9000}))
    observe(zero=get_balanced_memory(model, max_memory={0: 2000, 1: 2000, "cpu": 9000}, low_zero=True))


@script("one")
def plugin_defaults(observe: Observer) -> None:
    from accelerate.utils import (
        AutocastKwargs,
        DataLoaderConfiguration,
        DistributedDataParallelKwargs,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ProjectConfiguration,
    )

    for kind in (AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs, GradientAccumulationPlugin):
        handler = kind(num_steps=2) if kind is GradientAccumulationPlugin else kind()
        observe(**{kind.__name__: {name: str(value) for name, value in sorted(vars(handler).items())}})
        observe(changed=sorted(handler.to_kwargs()))
    observe(**{f"DataLoaderConfiguration.{name}": value for name, value in vars(DataLoaderConfiguration()).items()})
    observe(project=dict(sorted(vars(ProjectConfiguration("here")).items())))
    observe(group={name: str(value) for name, value in sorted(vars(InitProcessGroupKwargs()).items())})
    observe(kwargs=GradScalerKwargs(init_scale=2.0, growth_interval=5).to_kwargs())


@script("one")
def choices(observe: Observer) -> None:
    from accelerate import DistributedType
    from accelerate.utils import ComputeEnvironment, DynamoBackend, LoggerType, PrecisionType, RNGType

    for kind in (DistributedType, ComputeEnvironment, DynamoBackend, LoggerType, PrecisionType, RNGType):
        observe(**{f"{kind.__name__}.{member.name}": member.value for member in kind})
    observe(contains="bf16" in PrecisionType.list(), text=str(DistributedType.NO), equal=DistributedType.NO == "NO")


@script("one")
def is_available(observe: Observer) -> None:
    from accelerate import utils

    names = (
        "bf16",
        "cuda",
        "mps",
        "npu",
        "xpu",
        "mlu",
        "hpu",
        "musa",
        "deepspeed",
        "megatron_lm",
        "fp8",
        "torch_xla",
        "sagemaker",
    )
    observe(found={name: bool(getattr(utils, f"is_{name}_available")()) for name in names})
    observe(version=[utils.is_torch_version(">=", "2.0"), utils.compare_versions("torch", "<", "1.0")])


@script("one", "two")
def context_of_models(observe: Observer) -> None:
    from accelerate import Accelerator
    from accelerate.utils import has_compiled_regions, is_compiled_module

    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(2, 2))
    observe(compiled=is_compiled_module(model), regions=has_compiled_regions(model))
    observe(mapped=accelerator.verify_device_map(model))
    model.eval()
    observe(training=model.training)
