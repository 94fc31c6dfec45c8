"""Simulate a world of loaders in one process: every rank's prepared loader, without a process group."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from accelerate.data_loader import prepare_data_loader
from meshwright.data.loaders.base import PreparedLoader


class Stream(IterableDataset):
    """Numbers in order, of unknown length, keeping no state."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        if info is None:
            return iter(range(self.n))
        return iter(range(info.id, self.n, info.num_workers))


class StatefulStream(Stream):
    """Numbers in order, with a state of its own."""

    position = 0

    def __iter__(self) -> Iterator[int]:
        start, self.position = self.position, 0
        for number in range(start, self.n):
            self.position = number + 1
            yield number

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class StreamOfBatches(Stream):
    """Numbers in order, in batches that the data set makes itself."""

    def __init__(self, n: int, batch_size: int) -> None:
        super().__init__(n)
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(self.n).split(self.batch_size) if self.n else ())


class OpaqueBatchSampler(BatchSampler):
    """A batch sampler that the library does not know and can only iterate over."""


@dataclass(frozen=True)
class Data:
    """What a user's plain loader reads, and how it is sharded."""

    n: int
    batch_size: int
    shuffle: bool = False
    drop_last: bool = False
    even_batches: bool = True
    split_batches: bool = False
    kind: str = "map"
    workers: int = 0
    seedable: bool = False
    huge: bool = False

    def plain(self) -> DataLoader[Any]:
        options: dict[str, Any] = {"num_workers": self.workers}
        if self.kind == "opaque":
            sampler = OpaqueBatchSampler(SequentialSampler(range(self.n)), self.batch_size, self.drop_last)
            return DataLoader(range(self.n), batch_sampler=sampler, **options)
        if self.kind == "sampler of batches":
            data = torch.arange(self.n)
            sampler = RandomSampler(data) if self.shuffle else SequentialSampler(data)
            batches = BatchSampler(sampler, self.batch_size, self.drop_last)
            return DataLoader(data, sampler=batches, batch_size=None, **options)
        if self.kind == "stream of batches":
            return DataLoader(StreamOfBatches(self.n, self.batch_size), batch_size=None, **options)
        options |= {"batch_size": self.batch_size, "drop_last": self.drop_last}
        if self.kind == "stream":
            return DataLoader(Stream(self.n), **options)
        if self.kind == "stateful stream":
            return DataLoader(StatefulStream(self.n), **options)
        return DataLoader(range(self.n), shuffle=self.shuffle, **options)

    def world(self, size: int) -> list[PreparedLoader]:
        return [
            prepare_data_loader(
                self.plain(),
                num_processes=size,
                process_index=rank,
                split_batches=self.split_batches,
                even_batches=self.even_batches,
                dispatch_batches=False,
                use_seedable_sampler=self.seedable,
                constant_memory_shuffle=self.huge,
                data_seed=3,
            )
            for rank in range(size)
        ]


@dataclass
class Step:
    """What every rank got in one step, and what of it is real."""

    batches: list[list[int]]
    real: list[int]
    states: list[dict[str, Any]] = field(default_factory=list)
    """Every rank's position after the last step."""


def steps_of(world: list[PreparedLoader], limit: int | None = None, seed: int = 0) -> list[Step]:
    """Iterate all ranks in lockstep; ranks that end early have empty batches from then on."""
    iterators = []
    for loader in world:
        torch.manual_seed(seed)  # every rank of a real world takes rank 0's draw
        iterators.append(_Primed(loader))
    steps: list[Step] = []
    while limit is None or len(steps) < limit:
        batches = [iterator.next() for iterator in iterators]
        if all(batch is None for batch in batches):
            break
        rows = [[] if batch is None else batch.tolist() for batch in batches]
        partial = next((loader.partial_round for loader in world if loader.partial_round is not None), None)
        real = rows
        if partial is not None:  # a batch that the data set made counts as one sample
            sizes = [max(1, len(r) // partial.rows) for r in rows]
            real = [r[: count * size] for r, count, size in zip(rows, partial.counts, sizes, strict=True)]
        steps.append(Step(rows, list(chain(*real))))
    if steps:
        steps[-1].states = [copy.deepcopy(loader.state_dict()) for loader in world]
    for iterator in iterators:
        iterator.close()
    return steps


class _Primed:
    """An iterator whose first batch is read at once, so that its random order is drawn from the seed just set."""

    def __init__(self, loader: PreparedLoader) -> None:
        self._iterator = iter(loader)
        self._first = next(self._iterator, None)
        self._pending = True

    def next(self) -> Any:
        if self._pending:
            self._pending = False
            return self._first
        return next(self._iterator, None)

    def close(self) -> None:
        self._iterator.close()  # type: ignore[attr-defined]


def gathered(accelerator: Any, loader: Any, limit: int) -> list[int]:
    """Return the samples of the first batches, over all ranks."""
    seen: list[int] = []
    for step, batch in enumerate(loader):
        seen += accelerator.gather_for_metrics(batch).tolist()
        if step == limit - 1:
            break
    return seen
