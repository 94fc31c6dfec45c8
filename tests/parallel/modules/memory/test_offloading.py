"""Activations on the host."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    offload_activations,
    recompute_activations,
)
from meshwright.errors import UnsupportedSettingError
from tests.parallel.modules.memory.test_activations import stack
from tests.simulated_accelerator import run_on_a_simulated_accelerator

TOKENS = 512


def train(way: str, offloads: bool) -> tuple[list[Tensor], int]:
    """Return the parameters, and the memory that a forward and a backward pass took on the device."""
    options: dict[str, Any] = {}
    if way == "FSDP2":
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, transformer_cls_names_to_wrap=["Block"], state_dict_type="FULL_STATE_DICT"
        )
    elif way == "TP":
        plan = {"1.*.up": "colwise", "1.*.down": "rowwise"}
        options["parallelism_config"] = ParallelismConfig(tp_size=2, tp_plan=plan)
    elif way == "blocks on the host":
        options["offload"] = "host"
    accelerator = Accelerator(**options)
    model: nn.Module = stack(8)
    model = recompute_activations(model) if way == "recomputed" else model
    model = offload_activations(model, min_bytes=1 << 14) if offloads else model
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    peak = 0
    for step in range(3):
        torch.manual_seed(10 * step + (0 if way == "TP" else accelerator.process_index))
        inputs = torch.randn(TOKENS, 4).to(accelerator.device)
        torch.accelerator.synchronize()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        accelerator.backward(model(inputs).square().mean())
        torch.accelerator.synchronize()
        peak = torch.accelerator.max_memory_allocated() - before
        optimizer.step()
        optimizer.zero_grad()
    return [value.cpu() for value in accelerator.get_state_dict(model).values()], peak


WAYS = {"one process": 1, "recomputed": 1, "blocks on the host": 1, "DDP": 2, "FSDP2": 2, "TP": 2}


@pytest.mark.parametrize("way", WAYS)
def test_training_is_equal_to_the_bit_and_takes_less_memory_on_a_simulated_accelerator(way: str) -> None:
    # A process that has trained with tensor parallelism crashes when it forks on this device, with and without offload.
    options = {"world_size": WAYS[way], "in_new_processes": way == "TP"}
    own, expected = (
        run_on_a_simulated_accelerator(train, **options, way=way, offloads=offloads) for offloads in (True, False)
    )
    for (ours, less), (theirs, more) in zip(own, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))
        assert less < more * (0.9 if way in ("recomputed", "TP") else 0.5)  # DTensors stay


def test_on_a_cpu_nothing_is_copied() -> None:
    model = offload_activations(stack(), min_bytes=1)
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    model(torch.ones(2, 4)).sum().backward()
    torch.manual_seed(1)
    stack_alone = stack()
    torch.manual_seed(1)
    stack_alone(torch.ones(2, 4)).sum().backward()
    for own, expected in zip(model.parameters(), stack_alone.parameters(), strict=True):
        assert own.grad is not None
        assert expected.grad is not None
        assert torch.equal(own.grad, expected.grad)
    assert all(param.grad is None for param in other.parameters())


def test_offloading_twice_and_compiled_models_are_refused() -> None:
    with pytest.raises(UnsupportedSettingError, match="offload_activations with a second call"):
        offload_activations(offload_activations(stack()))
    with pytest.raises(UnsupportedSettingError, match="offload_activations with dynamo_backend"):
        Accelerator(cpu=True, dynamo_backend="eager").prepare(offload_activations(stack()))
