"""The task that every benchmark trains: so small that nothing hides what a library adds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

WIDTH = 64
CLASSES = 8
BATCH_SIZE = 8
ACCUMULATION = 4

loss_of = nn.CrossEntropyLoss()


def model() -> nn.Module:
    """Make an MLP of three layers, the same one every time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
    )


def data(batches: int = 40) -> Dataset[tuple[Tensor, ...]]:
    """Make random samples: this many full batches."""
    samples = batches * BATCH_SIZE
    return TensorDataset(torch.randn(samples, WIDTH), torch.randint(0, CLASSES, (samples,)))


def bare_steps(net: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> Iterator[None]:
    """Train for ever without a library; yield after every step."""
    while True:
        for inputs, labels in batches:
            loss = loss_of(net(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def our_steps(net: nn.Module, optimizer: Optimizer, batches: Iterable[Any], **options: Any) -> Iterator[None]:
    """Train for ever through the library; yield after every step."""
    accelerate = accelerator(**options)
    net, optimizer, batches = accelerate.prepare(net, optimizer, batches)
    while True:
        for inputs, labels in batches:
            loss = loss_of(net(inputs), labels)
            accelerate.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            yield


def our_windows(net: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> Iterator[None]:
    """Accumulate for ever through the library; yield after every window."""
    accelerate = accelerator(gradient_accumulation_steps=ACCUMULATION)
    net, optimizer, batches = accelerate.prepare(net, optimizer, batches)
    while True:
        for inputs, labels in batches:
            with accelerate.accumulate(net):
                loss = loss_of(net(inputs), labels)
                accelerate.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerate.sync_gradients:
                yield


def accelerator(**options: Any) -> Accelerator:
    """Make an Accelerator that shares no settings with an earlier one, in any version of the library."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)
