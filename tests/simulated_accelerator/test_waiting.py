"""Who waits for the devices, and who does not."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from meshwright import Accelerator, PartialState, cpu_offload
from meshwright.parallel.modules.averaging import average_gradients
from tests.simulated_accelerator import on_a_simulated_accelerator, run_on_a_simulated_accelerator
from tests.simulated_accelerator.counting import counted
from tests.simulated_accelerator.faults import delays


def waits_for_everyone() -> bool:
    """Return whether this device is idle after a barrier that was called while it computed."""
    accelerator = Accelerator()
    value = torch.ones(2, device=accelerator.device)
    accelerator.wait_for_everyone()
    with delays(kernel_time=0.5):
        value += 1
        accelerator.wait_for_everyone()
    return torch.accelerator.current_stream(accelerator.device).query()


def test_who_waits_for_everyone_waits_for_the_devices_on_simulated_accelerators() -> None:
    assert run_on_a_simulated_accelerator(waits_for_everyone, world_size=2) == [True, True]


def waits_of_averages() -> int:
    device = PartialState().device
    params = [nn.Parameter(torch.ones(3, device=device)) for _ in range(3)]
    for param in params:
        param.grad = torch.full_like(param, float(dist.get_rank()))
    average_gradients(params)
    with counted() as counts:
        average_gradients(params)
    assert [param.grad.tolist() for param in params if param.grad is not None] == [[0.5] * 3] * 3
    return counts.waits


def test_averages_do_not_wait_for_the_device_on_simulated_accelerators() -> None:
    assert run_on_a_simulated_accelerator(waits_of_averages, world_size=2) == [0, 0]


@on_a_simulated_accelerator
def test_offloaded_weights_arrive_on_one_stream_on_a_simulated_accelerator() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(40)))
    cpu_offload(model, execution_device=torch.device("gpu"))
    inputs = torch.ones(2, 8, device="gpu")
    with torch.no_grad(), counted() as counts:
        for _ in range(2):
            model(inputs)
    assert counts["stream"] <= 1
