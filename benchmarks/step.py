"""One training step through the library and in bare PyTorch, on one process. Loading the batch is part of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader

from .interleave import Comparison, compare, timed
from .task import ACCUMULATION, BATCH_SIZE, accelerator, data, loss_of, model


def run(rounds: int) -> list[Comparison]:
    """Measure every kind of step."""
    torch.set_num_threads(1)

    def row(what: str, bare: Iterator[None], ours: Iterator[None], target: float | None) -> Comparison:
        return compare(what, timed(bare), timed(ours), rounds=rounds, target=target)

    return [
        row("control: bare against bare", bare_full(AdamW), bare_full(AdamW), None),
        row("step, fp32, AdamW", bare_full(AdamW), ours("no", AdamW), 1.03),
        row("step, fp32, SGD", bare_full(SGD), ours("no", SGD), 1.03),
        row("step, bf16, AdamW", bare_bf16(), ours("bf16", AdamW), 1.05),
        row("step, fp16 with loss scaler, AdamW", bare_fp16(), ours("fp16", AdamW), None),
        row(f"{ACCUMULATION} accumulating micro-batches, SGD", bare_accumulating(), ours_accumulating(), 1.05),
    ]


def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(data(), batch_size=BATCH_SIZE)


def bare_full(make_optimizer: Callable[..., Optimizer]) -> Iterator[None]:
    net, batches = model(), loader()
    optimizer = make_optimizer(net.parameters(), lr=1e-3)
    while True:
        for inputs, labels in batches:
            loss = loss_of(net(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def bare_bf16() -> Iterator[None]:
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


def bare_fp16() -> Iterator[None]:
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


def ours(mixed_precision: str, make_optimizer: Callable[..., Optimizer]) -> Iterator[None]:
    accelerate = accelerator(mixed_precision=mixed_precision)
    net = model()
    net, optimizer, batches = accelerate.prepare(net, make_optimizer(net.parameters(), lr=1e-3), loader())
    while True:
        for inputs, labels in batches:
            loss = loss_of(net(inputs), labels)
            accelerate.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            yield


def bare_accumulating() -> Iterator[None]:
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


def ours_accumulating() -> Iterator[None]:
    """Yield after every window."""
    accelerate = accelerator(gradient_accumulation_steps=ACCUMULATION)
    net = model()
    net, optimizer, batches = accelerate.prepare(net, SGD(net.parameters(), lr=1e-3), loader())
    while True:
        for inputs, labels in batches:
            with accelerate.accumulate(net):
                loss = loss_of(net(inputs), labels)
                accelerate.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerate.sync_gradients:
                yield
