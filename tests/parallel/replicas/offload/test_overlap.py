"""Transfers overlap with computation, and the device holds two blocks at most."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from torch import nn

from meshwright import Accelerator
from tests.parallel.replicas.offload.training import Stack
from tests.simulated_accelerator import on_a_simulated_accelerator, run_on_a_simulated_accelerator, set_delays
from tests.simulated_accelerator.faults import moves_in_place
from tests.timing import ALONE

NUM_BLOCKS, WIDTH = 16, 128
BLOCK = sum(param.nbytes for param in Stack(1, WIDTH).blocks[0].parameters())
KERNEL = 3e-3
SECONDS_PER_BLOCK = 0.05
"""For the copy of a block's parameters to the device."""


def prepared(**options: Any) -> tuple[Accelerator, nn.Module, Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(**options)
    model = Stack(NUM_BLOCKS, WIDTH)
    with moves_in_place():
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    return accelerator, model, optimizer


def seconds_of_a_step(accelerator: Accelerator, model: nn.Module, optimizer: Any = None) -> float:
    inputs = torch.ones(4, 4, device=accelerator.device)
    torch.accelerator.synchronize()
    begin = time.perf_counter()
    accelerator.backward(model(inputs).square().mean())
    if optimizer is not None:
        optimizer.step()
    model.zero_grad()
    torch.accelerator.synchronize()
    return time.perf_counter() - begin


@on_a_simulated_accelerator
def test_a_step_takes_as_long_as_the_longer_of_compute_and_transfer_on_a_simulated_accelerator() -> None:
    slow_copies = {"copy_bytes_per_second": BLOCK / SECONDS_PER_BLOCK, "copy_latency": 0.0}
    in_memory = prepared()[:2]  # without the optimizer, whose steps are on the host otherwise
    seconds_of_a_step(*in_memory)
    set_delays(kernel_time=KERNEL, **slow_copies)
    computing = min(seconds_of_a_step(*in_memory) for _ in range(3))
    set_delays(kernel_time=0.0, copy_latency=0.0)
    offloaded = prepared(offload="host")
    for _ in range(3):  # from the second step on blocks step in the backward pass
        seconds_of_a_step(*offloaded)
    set_delays(kernel_time=0.0, **slow_copies)
    transferring = min(seconds_of_a_step(*offloaded) for _ in range(3))
    set_delays(kernel_time=KERNEL, **slow_copies)
    both = min(seconds_of_a_step(*offloaded) for _ in range(5))
    assert both <= (1.25 if ALONE else 1.6) * max(computing, transferring)
    assert both < 0.8 * (computing + transferring)


def memory_of_a_step(offload: str | None) -> tuple[int, int]:
    """Return the peak of the device's memory in a step, and what the activations of a forward pass take."""
    set_delays(kernel_time=0.0, copy_latency=0.0)
    gc.collect()
    before = torch.accelerator.memory_allocated()
    accelerator, model, optimizer = prepared(offload=offload)
    torch.accelerator.reset_peak_memory_stats()
    for _ in range(4):
        seconds_of_a_step(accelerator, model, optimizer)
    peak = torch.accelerator.max_memory_allocated() - before
    held = torch.accelerator.memory_allocated()
    outputs = model(torch.ones(4, 4, device=accelerator.device))
    torch.accelerator.synchronize()
    activations = torch.accelerator.memory_allocated() - held
    assert outputs.requires_grad
    return peak, activations


def test_the_device_holds_two_blocks_and_activations_on_a_simulated_accelerator() -> None:
    [(peak, activations)] = run_on_a_simulated_accelerator(memory_of_a_step, offload="host")
    [(in_memory, _)] = run_on_a_simulated_accelerator(memory_of_a_step, offload=None)
    outside = sum(param.nbytes for name, param in Stack(1, WIDTH).named_parameters() if "blocks" not in name)
    two_blocks = 2 * 2 * BLOCK  # parameters and gradients
    assert two_blocks / 2 < peak <= 1.1 * (two_blocks + activations + 2 * outside)
    assert in_memory > 5 * peak
