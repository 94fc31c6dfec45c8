"""One sharded step on two processes: through a library and by a hand-written `fully_shard` loop, in one group.

Whoever does not shard by FSDP2 fails: asked for it on a CPU, accelerate 1.15 trains by DDP and does not say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from .contenders import bare, current
from .interleave import Comparison, compare, timed
from .processes import run_on_two
from .task import CLASSES, WIDTH, loader

BLOCKS = 4


class Block(nn.Module):
    """What becomes a unit; a class, because accelerate 1.15 knows units by the names of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        """Run the layer."""
        return self.linear(inputs).relu()  # type: ignore[no-any-return]


def run(rounds: int) -> list[Comparison]:
    """Measure plain steps."""
    return run_on_two(on_every_rank, rounds)


def on_every_rank(rounds: int) -> list[Comparison]:
    library = current()
    return [
        compare(
            "FSDP2 step, AdamW, 2 processes",
            lambda: timed(sharded_steps(bare), dist.barrier),
            lambda: timed(sharded_steps(library), dist.barrier),
            rounds=rounds,
            target=1.05,
        )
    ]


def sharded_steps(who: Any) -> Iterator[None]:
    net = blocks()
    steps = who.sharded_steps(net, AdamW, loader())
    next(steps)
    if not all(isinstance(parameter, DTensor) for parameter in net.parameters()):
        raise RuntimeError("asked for FSDP2, it did not shard the parameters")
    return steps  # type: ignore[no-any-return]


def blocks() -> nn.Sequential:
    """Make a small model of equal blocks, each of which becomes a unit."""
    return nn.Sequential(nn.Sequential(*(Block() for _ in range(BLOCKS))), nn.Linear(WIDTH, CLASSES))
