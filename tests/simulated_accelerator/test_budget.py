"""A prepared loop waits for the device no more often than one written by hand, and asks for as many kernels.

Each loop is run twice on the same ranks: by hand with torch, and prepared. What is counted are steady steps.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from meshwright import Accelerator, PartialState, ProjectConfiguration
from meshwright.config.plugins.sharding import FullyShardedDataParallelPlugin
from tests.simulated_accelerator import run_on_a_simulated_accelerator
from tests.simulated_accelerator.counting import counted
from tests.simulated_accelerator.faults import moves_in_place
from tests.sizes import at_night

SAMPLES, BATCH, WARM_UP, STEPS = 128, 4, 4, 6


@dataclass
class Cost:
    """What one rank asked of its device in the counted steps."""

    waits: int
    kernels: int
    streams: int
    queries_of_other_threads: int
    what: dict[str, int]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(samples())


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(SAMPLES, 8, generator=generator), torch.randn(SAMPLES, 4, generator=generator))


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)), nn.Linear(8, 4))


def cost_of(steps: Iterator[None]) -> Cost:
    """Count the steps of a loop after the first ones."""
    for _ in range(WARM_UP):
        next(steps)
    torch.accelerator.synchronize()
    with counted() as counts:
        for _ in range(STEPS):
            next(steps)
    asked = counts.queries_by_thread
    asked.pop(threading.get_native_id(), None)
    torch.accelerator.synchronize()
    return Cost(
        waits=counts.waits,
        kernels=counts["kernel"],
        streams=counts["stream"],
        queries_of_other_threads=sum(asked.values()),
        what=dict(counts),
    )


# --- loops by hand


def by_hand(way: str) -> Iterator[None]:
    device = PartialState().device
    model: nn.Module = new_model().to(device)
    if way == "fsdp2":
        for part in model.children():
            fully_shard(part)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type) if way == "fp16" else None
    for inputs, targets in DataLoader(samples(), batch_size=BATCH):
        inputs, targets = inputs.to(device), targets.to(device)
        with torch.autocast(device.type, dtype=torch.float16, enabled=scaler is not None):
            loss = mse_loss(model(inputs), targets)
        if way == "num_items":
            items = torch.full((), len(inputs), device=device)
            dist.all_reduce(items)
            loss = loss * len(inputs) * 2 / items.clamp(min=1)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        yield


# --- prepared loops


def prepared(way: str, folder: str) -> Iterator[None]:
    options: dict[str, Any] = {}
    if way == "fp16":
        options["mixed_precision"] = "fp16"
    if way == "fsdp2":
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap=["Sequential"]
        )
    if way == "jsonl":
        options |= {"log_with": "jsonl", "project_config": ProjectConfiguration(logging_dir=folder)}
    if way == "meter":
        options["meter"] = True
    accelerator = Accelerator(**options)
    if way == "jsonl":
        accelerator.init_trackers("budget")
    model = new_model()
    loader = DataLoader(Stream() if way == "iterable" else samples(), batch_size=BATCH)
    with moves_in_place():
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for step, (inputs, targets) in enumerate(loader):
        loss = mse_loss(model(inputs), targets)
        if way == "num_items":
            accelerator.backward(loss * len(inputs), num_items=len(inputs))
        else:
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if way == "jsonl":
            accelerator.log({"step": float(step)}, step=step)
        yield


def costs(way: str, folder: str) -> tuple[Cost, Cost]:
    plain = "ddp" if way in ("iterable", "jsonl", "meter") else way
    with moves_in_place():
        hand = cost_of(by_hand(plain))
    return hand, cost_of(prepared(way, folder))


WAYS = ["ddp", "num_items", "iterable", at_night("fp16"), at_night("jsonl"), at_night("meter"), "fsdp2"]


@pytest.mark.parametrize("way", WAYS)
def test_a_prepared_loop_waits_no_more_often_on_simulated_accelerators(way: str, tmp_path: Path) -> None:
    ranks = run_on_a_simulated_accelerator(costs, world_size=2, way=way, folder=str(tmp_path))
    for hand, ours in ranks:
        print(way, hand, ours)
        assert ours.waits <= hand.waits, (hand, ours)
        assert ours.streams <= hand.streams
        assert ours.queries_of_other_threads == 0
        # All of the loader's work is in few kernels; small models make them show.
        assert ours.kernels <= 1.05 * hand.kernels + STEPS, (hand, ours)
