"""One training run of the small transformer, on the CPU or on the simulated accelerator, by every strategy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from meshwright import Accelerator
from tests.parallel.small_transformer import loader, model
from tests.parallel.ways import GLOBAL_BATCH, WAYS, passes

from .device_module import NAME
from .faults import moves_in_place, set_delays, synchronization_removed

Results = dict[str, Any]
"""The losses of all steps, the gradients of the last one, and the parameters after it."""


def train(
    way: str,
    *,
    cpu: bool = False,
    steps: int = 3,
    jitter_seed: int = 0,
    remove_synchronization: bool = False,
    plugged_in: bool = False,
    **options: Any,
) -> Results:
    """Train, and return losses, gradients and parameters as plain numbers, the same on every process.

    The device is like CUDA, or like one that is `plugged_in` to torch: see `moves_in_place`.
    """
    if not cpu:
        set_delays(copy_latency=100e-6, kernel_time=100e-6, jitter_seed=jitter_seed)
    if "cp" in way:
        from tests.parallel.mesh.context import cpu_attention

        cpu_attention.register()
    accelerator = Accelerator(cpu=cpu, **{**WAYS[way][1](), **options})
    assert accelerator.device.type == ("cpu" if cpu else NAME)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)  # Adam would make much of gradients that are nearly 0
    batches = loader(GLOBAL_BATCH // accelerator.strategy.num_data_ranks)
    with nullcontext() if plugged_in else moves_in_place():
        net, optimizer, batches = accelerator.prepare(net, optimizer, batches)
    losses, gradients = [], {}
    with synchronization_removed() if remove_synchronization else nullcontext():
        for step, batch in zip(range(steps), batches, strict=False):
            loss = passes(accelerator, way, net, *batch)
            optimizer.step()
            losses.append(accelerator.reduce(loss.detach(), "mean"))
            if step == steps - 1:
                gradients = dict(_whole(net, gradients=True))
            optimizer.zero_grad()
    return {
        "losses": [loss.item() for loss in losses],
        "gradients": gradients,
        "parameters": dict(_whole(net)),
    }


def _whole(net: Any, gradients: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of this process, or their gradients, whole and on the CPU."""
    for name, param in net.named_parameters():
        value = param.grad if gradients else param.detach()
        if value is not None:
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            yield name.removeprefix("module."), whole.detach().cpu().clone()


def assert_same(found: Results, expected: Results, **tolerances: float) -> None:
    """Compare what two runs gave."""
    torch.testing.assert_close(found["losses"], expected["losses"], **tolerances)
    for kind in ("gradients", "parameters"):
        assert found[kind].keys() == expected[kind].keys()
        torch.testing.assert_close(found[kind], expected[kind], **tolerances)
