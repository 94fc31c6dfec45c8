"""PyTorch without a library, as its own guide has it."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from ..task import ACCUMULATION, loss_of


def steps(net: nn.Module, optimizer: Optimizer, batches: DataLoader[Any], precision: str = "no") -> Iterator[None]:
    """Train for ever; yield after every step."""
    net, batches = _distributed(net), my_share(batches)
    return {"no": full_precision, "bf16": _bf16, "fp16": _fp16}[precision](net, optimizer, batches)


def full_precision(net: nn.Module, optimizer: Optimizer, batches: DataLoader[Any]) -> Iterator[None]:
    """Train a net that is ready, on batches that are."""
    while True:
        for inputs, labels in batches:
            loss = loss_of(net(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def _bf16(net: nn.Module, optimizer: Optimizer, batches: DataLoader[Any]) -> Iterator[None]:
    while True:
        for inputs, labels in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(net(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def _fp16(net: nn.Module, optimizer: Optimizer, batches: DataLoader[Any]) -> Iterator[None]:
    scaler = torch.amp.GradScaler("cpu")
    while True:
        for inputs, labels in batches:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_of(net(inputs), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            yield


def windows(net: nn.Module, optimizer: Optimizer, batches: DataLoader[Any]) -> Iterator[None]:
    """Accumulate for ever; yield after every window."""
    return accumulating(_distributed(net), optimizer, my_share(batches))


def accumulating(net: nn.Module, optimizer: Optimizer, batches: DataLoader[Any]) -> Iterator[None]:
    """Accumulate with a net that is ready, on batches that are."""
    without_sync = getattr(net, "no_sync", nullcontext)
    while True:
        for index, (inputs, labels) in enumerate(batches, start=1):
            closes = index % ACCUMULATION == 0
            with nullcontext() if closes else without_sync():
                loss = loss_of(net(inputs), labels) / ACCUMULATION
                loss.backward()
            if closes:
                optimizer.step()
                optimizer.zero_grad()
                yield


def sharded_steps(
    net: nn.Sequential, make_optimizer: Callable[..., Optimizer], batches: DataLoader[Any]
) -> Iterator[None]:
    """Train by FSDP2, one unit per block."""
    from torch.distributed.fsdp import fully_shard  # dear, and nothing else here needs it

    for block in net[0]:
        fully_shard(block)
    fully_shard(net)
    return full_precision(net, make_optimizer(net.parameters()), my_share(batches))


def evaluation(net: nn.Module, batches: DataLoader[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Predict for ever; yield the predictions and labels of all processes."""
    net, batches = _distributed(net), my_share(batches)
    net.eval()
    predictions_by_rank, labels_by_rank = (
        [torch.empty(batches.batch_size or 1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        for _ in range(2)
    )
    while True:
        for inputs, labels in batches:
            with torch.no_grad():
                predictions = net(inputs).argmax(dim=-1)
            dist.all_gather(predictions_by_rank, predictions)
            dist.all_gather(labels_by_rank, labels)
            yield torch.cat(predictions_by_rank), torch.cat(labels_by_rank)


def prepared(batches: DataLoader[Any]) -> DataLoader[Any]:
    """Return the loader as it is."""
    return batches


def train_and_save(net: nn.Module, optimizer: Optimizer, loader: DataLoader[Any], folder: Path, batches: int) -> None:
    """Train on the first batches and save."""
    steps = full_precision(net, optimizer, loader)
    for _ in range(batches):
        next(steps)
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, folder / "state.pt")


def resume(net: nn.Module, optimizer: Optimizer, loader: DataLoader[Any], folder: Path, batches: int) -> Tensor:
    """Load, read past what was trained on, and train on the next batch."""
    state = torch.load(folder / "state.pt")
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for index, (inputs, labels) in enumerate(loader):
        if index < batches:
            continue
        loss_of(net(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        return inputs  # type: ignore[no-any-return]
    raise RuntimeError(f"the loader has no batch {batches}")


def launch(script: Path, processes: int, folder: Path) -> list[object]:
    """Start one process by python, several by torchrun."""
    if processes == 1:
        return [sys.executable, script]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc_per_node={processes}",
        f"--master_port={port}",
        script,
    ]


def gather_alone(timeout: timedelta) -> None:
    """Gather on rank 0 only, and wait on the others."""
    dist.init_process_group("gloo", timeout=timeout)
    if dist.get_rank() == 0:
        dist.all_gather([torch.ones(1)] * dist.get_world_size(), torch.ones(1))
    dist.barrier()


def _distributed(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net) if dist.is_initialized() else net


def my_share(batches: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader of what this process reads of these batches."""
    if not dist.is_initialized():
        return batches
    sampler = DistributedSampler(batches.dataset, shuffle=False)  # type: ignore[var-annotated]
    return DataLoader(batches.dataset, batch_size=batches.batch_size, sampler=sampler)
