"""The weights of the next layer travel while a layer computes."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from meshwright import cpu_offload
from meshwright.inference.offload import streaming
from tests.simulated_accelerator import on_a_simulated_accelerator, set_delays, synchronization_removed
from tests.sizes import sized
from tests.timing import ALONE

LAYERS, WIDTH = 8, 256
SECONDS = 0.06
"""For the copy of a layer's weights, and for its product."""
SLOW_COPIES = {"copy_bytes_per_second": 4 * WIDTH * WIDTH / SECONDS, "copy_latency": 0.0}


def offloaded() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a model whose weights are on the host, an input, and what the model makes of it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).eval()
    inputs = torch.randn(2, WIDTH)
    with torch.no_grad():
        expected = model(inputs)
    return cpu_offload(model, execution_device=torch.device("gpu", 0)), inputs.to("gpu"), expected


@torch.no_grad()
def seconds_of(model: nn.Module, inputs: torch.Tensor) -> float:
    torch.accelerator.synchronize()
    begin = time.perf_counter()
    model(inputs)
    torch.accelerator.synchronize()
    return time.perf_counter() - begin


@on_a_simulated_accelerator
def test_copies_and_compute_overlap_on_a_simulated_accelerator() -> None:
    model, inputs, expected = offloaded()
    seconds_of(model, inputs)
    set_delays(**SLOW_COPIES, kernel_time=SECONDS)
    limit = (1.25 if ALONE else 1.6) * LAYERS * SECONDS
    # Now and then a delay is 16 times as long: in one of three passes at least one.
    assert any(seconds_of(model, inputs) <= limit for _ in range(12)), "one after the other they would take 2"
    with torch.no_grad():
        torch.testing.assert_close(model(inputs).cpu(), expected)


@on_a_simulated_accelerator
def test_weights_are_there_when_their_layer_computes_on_a_simulated_accelerator() -> None:
    model, inputs, expected = offloaded()
    wrong = 0
    for repeat in range(sized(gate=3, nightly=100)):
        set_delays(copy_latency=3e-3, kernel_time=1e-3, jitter_seed=repeat)
        with torch.no_grad():
            torch.testing.assert_close(model(inputs).cpu(), expected)
            with synchronization_removed():
                wrong += not torch.allclose(model(inputs).cpu(), expected)
            torch.accelerator.synchronize()
    assert wrong > 0, "a missing synchronisation would be seen"


@on_a_simulated_accelerator
def test_a_device_without_room_for_two_layers_holds_one_on_a_simulated_accelerator() -> None:
    model, inputs, expected = offloaded()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "allocatable_memory", lambda device: 4 * WIDTH * WIDTH)
        torch.testing.assert_close(model(inputs).cpu(), expected)
    held = torch.accelerator.max_memory_allocated() - before
    assert held < 1.5 * 4 * WIDTH * WIDTH
