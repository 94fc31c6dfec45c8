"""One sharded step on two processes: a prepared model and a hand-written `fully_shard` loop, in one process group."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.utils.data import DataLoader

from accelerate.utils import FullyShardedDataParallelPlugin

from .ddp import my_share
from .interleave import Comparison, compare, timed
from .processes import run_on_two
from .task import BATCH_SIZE, CLASSES, WIDTH, bare_steps, data, our_steps

BLOCKS = 4


def run(rounds: int) -> list[Comparison]:
    """Measure plain steps."""
    return run_on_two(on_every_rank, rounds)


def on_every_rank(rounds: int) -> list[Comparison]:
    return [
        compare(
            "FSDP2 step, AdamW, 2 processes",
            lambda: timed(bare_step(), dist.barrier),
            lambda: timed(our_step(), dist.barrier),
            rounds=rounds,
            target=1.05,
        )
    ]


def blocks() -> nn.Sequential:
    """Make a small model of equal blocks, each of which becomes a unit."""
    inner = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(BLOCKS)]
    return nn.Sequential(nn.Sequential(*inner), nn.Linear(WIDTH, CLASSES))


def bare_step() -> Iterator[None]:
    net = blocks()
    for block in net[0]:
        fully_shard(block)
    fully_shard(net)
    return bare_steps(net, AdamW(net.parameters()), my_share())


def our_step() -> Iterator[None]:
    net = blocks()
    batches = DataLoader(data(), batch_size=BATCH_SIZE)
    return our_steps(net, AdamW(net.parameters()), batches, fsdp_plugin=FullyShardedDataParallelPlugin())
