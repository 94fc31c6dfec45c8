"""One data-parallel step on two processes: a prepared model and a hand-written DDP loop, in the same process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.utils.data import DataLoader, DistributedSampler

from .interleave import Comparison, compare, timed
from .processes import run_on_two
from .task import ACCUMULATION, BATCH_SIZE, accelerator, data, loss_of, model


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
    samples, net = data(), DistributedDataParallel(model())
    batches = DataLoader(samples, batch_size=BATCH_SIZE, sampler=DistributedSampler(samples, shuffle=False))
    optimizer = AdamW(net.parameters())
    while True:
        for inputs, labels in batches:
            loss = loss_of(net(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def our_step() -> Iterator[None]:
    accelerate, net = accelerator(), model()
    net, optimizer, batches = accelerate.prepare(
        net, AdamW(net.parameters()), DataLoader(data(), batch_size=BATCH_SIZE)
    )
    while True:
        for inputs, labels in batches:
            loss = loss_of(net(inputs), labels)
            accelerate.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            yield


def bare_window() -> Iterator[None]:
    """Yield after every window."""
    samples, net = data(), DistributedDataParallel(model())
    batches = DataLoader(samples, batch_size=BATCH_SIZE, sampler=DistributedSampler(samples, shuffle=False))
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
    accelerate, net = accelerator(gradient_accumulation_steps=ACCUMULATION), model()
    net, optimizer, batches = accelerate.prepare(
        net, AdamW(net.parameters()), DataLoader(data(), batch_size=BATCH_SIZE)
    )
    while True:
        for inputs, labels in batches:
            with accelerate.accumulate(net):
                loss = loss_of(net(inputs), labels)
                accelerate.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerate.sync_gradients:
                yield
