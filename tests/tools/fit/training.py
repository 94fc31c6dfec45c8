"""One training function for all tests of batch sizes that fit: dropout, batch norm, shuffling, AdamW and a schedule."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from meshwright import Accelerator, set_seed

FEATURES, SAMPLES = 16, 256


def make_net(hidden: int = 64, *, exact: bool = False) -> nn.Sequential:
    """Make a net; an exact one computes the same in batches of any size."""
    between = [] if exact else [nn.BatchNorm1d(hidden), nn.Dropout(0.2)]
    return nn.Sequential(nn.Linear(FEATURES, hidden), *between, nn.GELU(), nn.Linear(hidden, 1))


def make_loader(batch_size: int) -> DataLoader[Any]:
    """Make a shuffled loader of the same samples every time."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(SAMPLES, FEATURES, generator=generator)
    return DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=batch_size, shuffle=True)


class OutOfMemory(torch.autograd.Function):
    """Stand for an operation whose backward pass needs memory that is not there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, too_large: bool) -> Tensor:
        ctx.too_large = too_large
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.too_large:
            raise torch.OutOfMemoryError("out of memory: tried to allocate 2.00 GiB")
        return gradient, None


def steps(
    accelerator: Accelerator,
    net: nn.Module,
    optimizer: Any,
    loader: Any,
    scheduler: Any = None,
    *,
    most_rows: int | None = None,
    epochs: int = 1,
) -> list[float]:
    """Train; return the mean loss of every step, the same on every rank. A backward pass takes at most some rows."""
    losses, window = [], []
    for _ in range(epochs):
        for features, targets in loader:
            with accelerator.accumulate(net):
                output = net(features)
                too_large = most_rows is not None and len(features) > most_rows
                loss = nn.functional.mse_loss(OutOfMemory.apply(output, too_large), targets)  # type: ignore[no-untyped-call]
                accelerator.backward(loss)
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                optimizer.zero_grad()
            window.append(accelerator.reduce(loss.detach(), "mean").item())
            if accelerator.sync_gradients:
                losses.append(sum(window) / len(window))
                window = []
    return losses


def train(batch_size: int, accelerator: Accelerator, *, most_rows: int | None = None, **options: Any) -> list[float]:
    """Make everything and train; return the losses, and at last a number of every generator."""
    net = make_net(**options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    net, optimizer, scheduler, loader = accelerator.prepare(net, optimizer, scheduler, make_loader(batch_size))
    losses = steps(accelerator, net, optimizer, loader, scheduler, most_rows=most_rows, epochs=2)
    return [*losses, random.random(), float(np.random.rand()), torch.rand(()).item(), scheduler.get_last_lr()[0]]


def by_hand(batch_size: int, accumulation: int, *, seed: int = 7, **options: Any) -> list[float]:
    """Train as somebody who knows which batch size fits."""
    settings = options.pop("settings", {})
    accelerator = Accelerator(gradient_accumulation_steps=accumulation, **settings)
    set_seed(seed, device_specific=True)
    return train(batch_size, accelerator, **options)
