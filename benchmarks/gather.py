"""An evaluation loop on two processes: what the library gathers for metrics, and a bare `all_gather` into a list."""

from __future__ import annotations

import torch.distributed as dist

from .contenders import bare, current
from .interleave import Comparison, compare, timed
from .processes import run_on_two
from .task import loader, model


def run(rounds: int) -> list[Comparison]:
    """Measure one batch of an evaluation: load, predict, gather predictions and labels."""
    return run_on_two(on_every_rank, rounds)


def on_every_rank(rounds: int) -> list[Comparison]:
    library = current()
    return [
        compare(
            "evaluation batch with its predictions gathered, 2 processes",
            lambda: timed(bare.evaluation(model(), loader()), dist.barrier),
            lambda: timed(library.evaluation(model(), loader()), dist.barrier),
            rounds=rounds,
            target=1.10,
        )
    ]
