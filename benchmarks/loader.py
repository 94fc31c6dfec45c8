"""A batch from a prepared loader and from the plain one, and reading on one process against reading on each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from .contenders import current
from .interleave import Comparison, compare, timed
from .processes import run_on_two
from .task import BATCH_SIZE, data

MANY = 4000  # batches: more than are measured, so that no epoch ends on the way


def run(rounds: int) -> list[Comparison]:
    """Measure the next batch: with and without workers, and dispatched."""
    torch.set_num_threads(1)
    rows = [_against_the_plain_loader(rounds, workers) for workers in (0, 2)]
    if current().DISTRIBUTION == "accelerate":
        rows += run_on_two(dispatched, rounds)
    return rows


def _against_the_plain_loader(rounds: int, workers: int) -> Comparison:
    library = current()
    return compare(
        f"next batch of a prepared loader, {workers} workers",
        lambda: timed(forever(plain(workers))),
        lambda: timed(forever(library.prepared(plain(workers)))),
        rounds=rounds,
        target=1.05,
    )


def dispatched(rounds: int) -> list[Comparison]:
    from accelerate import DataLoaderConfiguration

    library = current()

    def batches(dispatch: bool) -> Iterator[Any]:
        config = DataLoaderConfiguration(dispatch_batches=dispatch)
        return forever(library.prepared(plain(), dataloader_config=config))

    return [
        compare(
            "next batch dispatched / read by each process, 2 processes",
            lambda: timed(batches(dispatch=False), dist.barrier),
            lambda: timed(batches(dispatch=True), dist.barrier),
            rounds=rounds,
        )
    ]


def plain(workers: int = 0) -> DataLoader[Any]:
    return DataLoader(data(MANY), batch_size=BATCH_SIZE, num_workers=workers, shuffle=True)


def forever(loader: Any) -> Iterator[Any]:
    """Yield batches, epoch after epoch."""
    while True:
        yield from loader
