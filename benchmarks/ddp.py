"""One data-parallel step on two processes: through a library and by a hand-written DDP loop, in one process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.optim import AdamW

from .contenders import bare, current
from .interleave import Comparison, compare, timed
from .processes import run_on_two
from .task import ACCUMULATION, loader, model


def run(rounds: int) -> list[Comparison]:
    """Measure plain and accumulating steps."""
    return run_on_two(on_every_rank, rounds)


def on_every_rank(rounds: int) -> list[Comparison]:
    library = current()

    def row(what: str, loop: Callable[[Any], Iterator[None]], target: float) -> Comparison:
        return compare(
            what,
            lambda: timed(loop(bare), dist.barrier),
            lambda: timed(loop(library), dist.barrier),
            rounds=rounds,
            target=target,
        )

    return [
        row("DDP step, AdamW, 2 processes", steps, 1.03),
        row(f"DDP, {ACCUMULATION} accumulating micro-batches, AdamW, 2 processes", windows, 1.05),
    ]


def steps(who: Any) -> Iterator[None]:
    net = model()
    return who.steps(net, AdamW(net.parameters()), loader())  # type: ignore[no-any-return]


def windows(who: Any) -> Iterator[None]:
    net = model()
    return who.windows(net, AdamW(net.parameters()), loader())  # type: ignore[no-any-return]
