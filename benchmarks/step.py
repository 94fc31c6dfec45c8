"""One training step through the library and in bare PyTorch, on one process. Loading the batch is part of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader

from .interleave import Comparison, compare, timed
from .task import ACCUMULATION, BATCH_SIZE, bare_steps, data, loss_of, model, our_steps, our_windows

Loop = Callable[[], Iterator[None]]
"""Start a training loop that yields after every step."""

MakeOptimizer = Callable[..., Optimizer]


def run(rounds: int) -> list[Comparison]:
    """Measure every kind of step."""
    torch.set_num_threads(1)

    def row(what: str, bare: Loop, ours: Loop, target: float | None) -> Comparison:
        return compare(what, lambda: timed(bare()), lambda: timed(ours()), rounds=rounds, target=target)

    return [
        row("control: bare against bare, SGD", partial(bare_step, SGD), partial(bare_step, SGD), None),
        row("step, SGD", partial(bare_step, SGD), partial(our_step, SGD), 1.03),
        row("step, AdamW", partial(bare_step, AdamW), partial(our_step, AdamW), 1.03),
        row("step, AdamW, bf16", bare_bf16_step, partial(our_step, AdamW, "bf16"), 1.05),
        # accelerate 1.x computes this one in fp32 on a CPU, so as a reference it falls below 1.
        row("step, AdamW, fp16 and its loss scaler", bare_fp16_step, partial(our_step, AdamW, "fp16"), None),
        row(f"{ACCUMULATION} accumulating micro-batches, SGD", bare_window, our_window, 1.05),
    ]


def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(data(), batch_size=BATCH_SIZE)


def bare_step(make_optimizer: MakeOptimizer) -> Iterator[None]:
    net = model()
    return bare_steps(net, make_optimizer(net.parameters(), lr=1e-3), loader())


def bare_bf16_step() -> Iterator[None]:
    net, batches = model(), loader()
    optimizer = AdamW(net.parameters())
    while True:
        for inputs, labels in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(net(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def bare_fp16_step() -> Iterator[None]:
    net, batches = model(), loader()
    optimizer, scaler = AdamW(net.parameters()), torch.amp.GradScaler("cpu")
    while True:
        for inputs, labels in batches:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_of(net(inputs), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            yield


def our_step(make_optimizer: MakeOptimizer, mixed_precision: str = "no") -> Iterator[None]:
    net = model()
    optimizer = make_optimizer(net.parameters(), lr=1e-3)
    return our_steps(net, optimizer, loader(), mixed_precision=mixed_precision)


def bare_window() -> Iterator[None]:
    """Yield after every window."""
    net, batches = model(), loader()
    optimizer = SGD(net.parameters(), lr=1e-3)
    while True:
        for index, (inputs, labels) in enumerate(batches, start=1):
            loss = loss_of(net(inputs), labels) / ACCUMULATION
            loss.backward()
            if index % ACCUMULATION == 0:
                optimizer.step()
                optimizer.zero_grad()
                yield


def our_window() -> Iterator[None]:
    """Yield after every window."""
    net = model()
    return our_windows(net, SGD(net.parameters(), lr=1e-3), loader())
