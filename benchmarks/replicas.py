"""A step whose gradients the library reduces itself, as a transaction, and one by DDP, on 2 and on 4 processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from .contenders.bare import full_precision, my_share
from .interleave import Comparison, Lap, compare, timed
from .processes import run_on
from .task import CLASSES, WIDTH, loader, loss_of, model

TARGET = 1.01
TARGET_OF_COMPARISON = 2.0
"""With a comparison in every step; every 100 steps it is 1.01."""
HIDDEN, LAYERS = 1024, 8
"""Of a model of several buckets: 32 MiB of gradients."""


def run(rounds: int) -> list[Comparison]:
    """Measure a small and a large model."""
    return [*run_on(on_every_rank, rounds, 2), *run_on(on_every_rank, rounds, 4)]


def on_every_rank(rounds: int) -> list[Comparison]:
    few = max(2, rounds // 10)
    return [
        row("", model, rounds),
        row(", 32 MiB of gradients", large_model, few),
        row_of_comparison("", model, rounds),
        row_of_comparison(", 32 MiB of parameters", large_model, few),
    ]


def row(which: str, make: Callable[[], nn.Module], rounds: int) -> Comparison:
    what = f"step by the reducer of replicas / by DDP{which}, {dist.get_world_size()} processes"
    return compare(what, lambda: lap_of_ddp(make()), lambda: lap_of_reducer(make()), rounds=rounds, target=TARGET)


def row_of_comparison(which: str, make: Callable[[], nn.Module], rounds: int) -> Comparison:
    what = f"step with replicas compared in each / without{which}, {dist.get_world_size()} processes"
    target = TARGET_OF_COMPARISON
    return compare(what, lambda: lap_of_ddp(make()), lambda: lap_of_comparison(make()), rounds=rounds, target=target)


def lap_of_comparison(net: nn.Module) -> Lap:
    from meshwright.parallel.replicas.checksums import PeriodicComparison, require_equal_replicas

    optimizer, ranks = SGD(net.parameters(), 1e-3), range(dist.get_world_size())
    comparison = PeriodicComparison(1, lambda: require_equal_replicas([net], ranks, None, torch.device("cpu")))
    comparison.follow(optimizer)
    steps = full_precision(DistributedDataParallel(net), optimizer, my_share(loader()))

    def compared_steps() -> Iterator[None]:
        yield from (None for _ in steps if comparison)  # which is referred to as long as there are steps

    return timed(compared_steps(), dist.barrier)


def lap_of_ddp(net: nn.Module) -> Lap:
    steps = full_precision(DistributedDataParallel(net), SGD(net.parameters(), 1e-3), my_share(loader()))
    return timed(steps, dist.barrier)


def lap_of_reducer(net: nn.Module) -> Lap:
    return timed(reduced_steps(net, SGD(net.parameters(), 1e-3)), dist.barrier)


def reduced_steps(net: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Train for ever; yield after every step."""
    from meshwright.parallel.replicas.reducer import GradientReducer

    reducer = GradientReducer(net.parameters())
    reducer.bind(None, dist.get_world_size())
    batches = my_share(loader())
    while True:
        for inputs, labels in batches:
            loss = loss_of(net(inputs), labels)
            reducer.begin()
            loss.backward()
            reducer.finish()
            optimizer.step()
            reducer.release()
            optimizer.zero_grad()
            yield


def large_model() -> nn.Module:
    """Make an MLP whose gradients fill several buckets."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(HIDDEN, HIDDEN), nn.ReLU())]
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), *layers, nn.Linear(HIDDEN, CLASSES))
