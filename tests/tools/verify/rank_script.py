"""A training script whose ranks do something of their own: `rank_script.py FAULT`."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from meshwright import Accelerator, set_seed

FAULT = sys.argv[1]
accelerator = Accelerator()
RANK, PROCESSES = accelerator.process_index, accelerator.num_processes


class Samples(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x, y = torch.randn(6, generator=generator), torch.randint(0, 3, (), generator=generator)
        return (x + 0.1 * RANK if FAULT == "augmentation" else x), y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.register_buffer("average", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.up(x))
        if FAULT == "buffer":
            self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)  # type: ignore[operator]
            x = x + self.average
        if FAULT == "offset":
            x = x + 0.1 * RANK
        if FAULT == "detached" and RANK == 1:
            x = x.detach() + 0 * x
        return self.down(torch.tanh(self.middle(x)))  # type: ignore[no-any-return]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    group = optimizer.param_groups[0]
    group["lr"] *= 1 + RANK if FAULT == "rate" else PROCESSES if FAULT == "rate_times_processes" else 1
    group["weight_decay"] = 0.1 * RANK if FAULT == "decay" else 0.01
    group["eps"] = 1e-8 * 10 ** (6 * RANK) if FAULT == "epsilon" else 1e-8
    return optimizer


def backward(model: Any, x: Tensor, y: Tensor) -> None:
    with accelerator.no_sync(model) if FAULT == "never_synchronised" else nullcontext():
        loss = F.cross_entropy(model(x), y)
        if FAULT == "divided":
            loss = loss / PROCESSES
        if FAULT == "multiplied":
            loss = loss * PROCESSES
        accelerator.backward(loss)


def change_gradients(model: nn.Module) -> None:
    if FAULT == "zeroed" and RANK == 1:
        model.middle.bias.grad.zero_()  # type: ignore[union-attr, operator]
    if FAULT == "clipped_alone" and RANK == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def main() -> None:
    set_seed(3)
    model: Any = Model()
    if FAULT != "buffer":
        del model.average
    optimizer: Any = make_optimizer(model)
    plain_loader = DataLoader(Samples(), batch_size=8)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    plain_scheduler = scheduler
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, plain_loader, scheduler)
    inner = accelerator.unwrap_model(model)
    if FAULT == "gradient_hook":
        inner.middle.weight.register_hook(lambda gradient: gradient * (1 + RANK))
    for step, (x, y) in enumerate(plain_loader if FAULT == "same_samples" else loader):
        backward(model, x, y)
        change_gradients(inner)
        if FAULT == "skipped_step" and RANK == 1 and step == 1:
            optimizer.zero_grad()
            continue
        optimizer.step()
        for _ in range(PROCESSES if FAULT == "scheduler_steps" else 0):
            plain_scheduler.step()
        optimizer.zero_grad()
        if FAULT == "drift":
            with torch.no_grad():
                inner.down.bias.add_(0.01 * RANK)


if __name__ == "__main__":
    main()
