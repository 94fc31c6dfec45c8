"""One step on an XLA device: a prepared loop, and the same loop by hand with torch_xla.

torch_xla has a venv of its own, `.ci/install_xla`: `PJRT_DEVICE=CPU .ci/venv-xla/bin/python -m benchmarks xla --here`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.optim import AdamW

from accelerate.utils import is_torch_xla_available
from meshwright import Accelerator

from .interleave import Comparison, compare, timed
from .task import loader, loss_of, model


def run(rounds: int) -> list[Comparison]:
    """Measure a step, its result included, where torch_xla is installed."""
    if not is_torch_xla_available():
        return []
    return [
        compare(
            "XLA step, AdamW",
            lambda: timed(bare_step()),
            lambda: timed(our_step()),
            rounds=rounds,
            target=1.05,
        )
    ]


def bare_step() -> Iterator[float]:
    import torch_xla

    device = torch_xla.device()
    net = model().to(device)
    optimizer = AdamW(net.parameters())
    batches = loader()
    while True:
        for inputs, targets in batches:
            loss: Tensor = loss_of(net(inputs.to(device)), targets.to(device))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            torch_xla.sync()
            yield loss.item()


def our_step() -> Iterator[float]:
    accelerator = Accelerator()
    net = model()
    net, optimizer, batches = accelerator.prepare(net, AdamW(net.parameters()), loader())
    while True:
        for inputs, targets in batches:
            loss: Tensor = loss_of(net(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()
