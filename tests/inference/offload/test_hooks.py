"""Hooks around forward passes, as other libraries use them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelerate.big_modeling import attach_layerwise_casting_hooks
from accelerate.hooks import (
    AlignDevicesHook,
    CpuOffload,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    attach_align_device_hook,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accelerate.utils import align_module_device, has_offloaded_params
from meshwright import cpu_offload_with_hook
from tests.simulated_accelerator import on_a_simulated_accelerator


class AddOne(ModelHook):
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (args[0] + 1, *args[1:]), kwargs


class Double(ModelHook):
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output * 2


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)).eval()


def test_a_hook_surrounds_forward_and_leaves_no_trace() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    expected = layer(x + 1)
    forward = layer.forward
    add_hook_to_module(layer, AddOne())
    assert torch.equal(layer(x), expected)
    assert layer.forward.__name__ == "forward"
    assert layer._old_forward == forward
    remove_hook_from_module(layer)
    assert torch.equal(layer(x + 1), expected)
    assert not hasattr(layer, "_hf_hook")
    assert not hasattr(layer, "_old_forward")


def test_hooks_replace_each_other_or_follow_each_other() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    expected = layer(x)
    first, second = Double(), Double()
    add_hook_to_module(layer, first)
    add_hook_to_module(layer, Double())
    assert torch.equal(layer(x), 2 * expected), "the second took the place of the first"
    add_hook_to_module(layer, second, append=True)
    assert isinstance(layer._hf_hook, SequentialHook)
    assert layer._hf_hook.hooks[1] is second
    assert torch.equal(layer(x), 4 * expected)
    add_hook_to_module(layer, SequentialHook(first))
    assert torch.equal(layer(x), 2 * expected)


def test_forward_and_hook_are_looked_up_at_each_call() -> None:
    layer = nn.Linear(2, 2)
    add_hook_to_module(layer, ModelHook())
    layer._old_forward = lambda x: x * 10  # type: ignore[assignment]
    assert layer(torch.ones(1)) == 10
    layer._hf_hook = Double()  # type: ignore[assignment]
    assert layer(torch.ones(1)) == 20


def test_a_hook_without_gradients_and_a_copy_of_a_hooked_module() -> None:
    hook = ModelHook()
    hook.no_grad = True
    layer = add_hook_to_module(nn.Linear(2, 2), hook)
    assert not layer(torch.ones(1, 2)).requires_grad
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.zero_()
        twin.bias.zero_()
    assert not twin(torch.ones(1, 2)).any(), "the copy computes with its own weights"
    assert layer(torch.ones(1, 2)).any()


class AddsOne(ModelHook):
    """Call a module with one more."""

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (args[0] + 1,), kwargs


def test_a_traced_module_follows_its_graph_under_a_hook_and_after_it() -> None:
    def times(factor: int) -> None:
        [output] = [node for node in traced.graph.nodes if node.op == "output"]
        with traced.graph.inserting_before(output):
            output.args = (traced.graph.call_function(torch.mul, (output.args[0], factor)),)
        traced.recompile()

    traced = torch.fx.symbolic_trace(nn.Identity())
    add_hook_to_module(traced, AddsOne())
    assert traced(torch.ones(1)) == 2
    times(10)
    assert traced(torch.ones(1)) == 20
    remove_hook_from_module(traced)
    assert traced(torch.ones(1)) == 10
    times(10)
    assert traced(torch.ones(1)) == 100


def test_offloaded_weights_are_loaded_for_forward_only() -> None:
    layers, x = model(), torch.randn(2, 3)
    expected = layers(x)
    attach_align_device_hook(layers, execution_device="cpu", offload=True)
    assert {p.device.type for p in layers.parameters()} == {"meta"}
    assert {b.device.type for b in layers.buffers()} == {"cpu"}
    assert has_offloaded_params(layers[0])
    assert not has_offloaded_params(layers)
    torch.testing.assert_close(layers(x), expected)
    assert {p.device.type for p in layers.parameters()} == {"meta"}
    with align_module_device(layers[0]), torch.no_grad():
        layers[0].weight.zero_()
        layers[0].bias.zero_()
    torch.testing.assert_close(layers(x), layers(x * 5), msg="what was written inside the block is kept")
    remove_hook_from_submodules(layers)
    assert not layers[0].weight.is_meta
    assert not layers[0].weight.any()


def test_weights_are_offloaded_after_an_error() -> None:
    layers = model()
    attach_align_device_hook(layers, execution_device="cpu", offload=True)
    with pytest.raises(RuntimeError):
        layers(torch.randn(2, 7))
    assert layers[0].weight.is_meta
    assert layers(torch.randn(2, 3)).shape == (2, 5)


def test_a_hook_takes_the_weights_map_that_another_library_gives_it() -> None:
    layer = nn.Linear(2, 2, bias=False)
    add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True))
    hook = layer._hf_hook
    assert isinstance(hook, AlignDevicesHook)
    assert hook.original_devices == {"weight": torch.device("cpu")}
    hook.weights_map = {"weight": torch.eye(2) * 3}
    assert torch.equal(layer(torch.ones(1, 2)), torch.full((1, 2), 3.0))
    hook.weights_map = {"weight": torch.eye(2, dtype=torch.float64)}
    assert layer(torch.ones(1, 2)).dtype == torch.float32, "a stored weight takes the dtype of the module"


def test_linear_layers_are_stored_in_a_small_dtype() -> None:
    layers = model()
    attach_layerwise_casting_hooks(layers, torch.bfloat16, torch.float32, skip_modules_pattern=["2"])
    assert [p.dtype for p in layers.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 4
    assert layers(torch.randn(2, 3)).dtype == torch.float32
    assert layers[0].weight.dtype == torch.bfloat16


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, str]:
        return self.layer(x), str(cache.device)


@on_a_simulated_accelerator
def test_inputs_move_to_the_device_and_outputs_back_on_a_simulated_accelerator() -> None:
    module = Skipping()
    add_hook_to_module(module, AlignDevicesHook(1, io_same_device=True, place_submodules=True, skip_keys="cache"))
    assert str(module.layer.weight.device) == "gpu:1"
    output, device_of_cache = module(torch.ones(1, 2), cache=torch.ones(1))
    assert (str(output.device), device_of_cache) == ("cpu", "cpu")
    assert module(torch.ones(1, 2), torch.ones(1))[1] == "gpu:1"


@on_a_simulated_accelerator
def test_models_of_a_pipeline_take_turns_on_a_simulated_accelerator() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    first, first_hook = cpu_offload_with_hook(first)  # type: ignore[assignment]
    second, second_hook = cpu_offload_with_hook(second, "gpu:0", prev_module_hook=first_hook)  # type: ignore[assignment]
    assert isinstance(second._hf_hook, CpuOffload)
    assert second._hf_hook.prev_module_hook is first_hook
    x = torch.ones(1, 2)
    for _ in range(2):
        x = first(x)
        assert str(x.device) == "gpu:0"
        assert (first.weight.device.type, second.weight.device.type) == ("gpu", "cpu")
        x = second(x)
        assert (first.weight.device.type, second.weight.device.type) == ("cpu", "gpu")
        first_hook.offload()
        second_hook.offload()
    assert second.weight.device.type == "cpu"
    second_hook.remove()
    assert not hasattr(second, "_hf_hook")
