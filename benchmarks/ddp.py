"""One data-parallel step on two processes: a prepared model and a hand-written DDP loop, in the same process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.utils.data import DataLoader, DistributedSampler

from .interleave import Comparison, compare, timed
from .processes import run_on_two
from .task import ACCUMULATION, BATCH_SIZE, bare_steps, data, loss_of, model, our_steps, our_windows


def run(rounds: int) -> list[Comparison]:
    """Measure plain and accumulating steps."""
    return run_on_two(on_every_rank, rounds)


def on_every_rank(rounds: int) -> list[Comparison]:
    return [
        compare(
            "DDP step, AdamW, 2 processes",
            lambda: timed(bare_step(), dist.barrier),
            lambda: timed(our_step(), dist.barrier),
            rounds=rounds,
            target=1.03,
        ),
        compare(
            f"DDP, {ACCUMULATION} accumulating micro-batches, AdamW, 2 processes",
            lambda: timed(bare_window(), dist.barrier),
            lambda: timed(our_window(), dist.barrier),
            rounds=rounds,
            target=1.05,
        ),
    ]


def bare_step() -> Iterator[None]:
    net = DistributedDataParallel(model())
    return bare_steps(net, AdamW(net.parameters()), my_share())


def our_step() -> Iterator[None]:
    net = model()
    return our_steps(net, AdamW(net.parameters()), DataLoader(data(), batch_size=BATCH_SIZE))


def my_share() -> DataLoader[Any]:
    samples = data()
    return DataLoader(samples, batch_size=BATCH_SIZE, sampler=DistributedSampler(samples, shuffle=False))


def bare_window() -> Iterator[None]:
    """Yield after every window."""
    net, batches = DistributedDataParallel(model()), my_share()
    optimizer = AdamW(net.parameters())
    while True:
        for index, (inputs, labels) in enumerate(batches, start=1):
            closes = index % ACCUMULATION == 0
            with nullcontext() if closes else net.no_sync():
                loss = loss_of(net(inputs), labels) / ACCUMULATION
                loss.backward()
            if closes:
                optimizer.step()
                optimizer.zero_grad()
                yield


def our_window() -> Iterator[None]:
    """Yield after every window."""
    net = model()
    return our_windows(net, AdamW(net.parameters()), DataLoader(data(), batch_size=BATCH_SIZE))
