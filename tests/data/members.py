"""Simulate members that come and go in one process: every member's loader, read in lockstep."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from meshwright import DataLoaderShard, GradientAccumulationPlugin
from meshwright.runtime.loop.gradient_state import GradientState
from tests.data.worlds import Data

Batches = dict[int, list[int]]


class Members:
    """Loaders of all nominal ranks; a window's samples count when it is committed."""

    def __init__(self, data: Data, replicas: int, num_steps: int = 1, *, trains: bool = True) -> None:
        self.data, self.replicas, self.num_steps, self.trains = data, replicas, num_steps, trains
        self.loaders: dict[int, DataLoaderShard] = {}
        self.iterators: dict[int, Iterator[Any]] = {}
        self.held: Batches = {}
        """Samples in the gradients of every member."""
        self.metrics: list[int] = []
        """Samples that metrics saw, gathered after every backward pass."""
        self.rows: Batches = {}
        self.steps: list[list[int]] = []
        for rank in range(replicas):
            self.add(rank, tuple(range(replicas)))

    def add(self, rank: int, members: tuple[int, ...]) -> DataLoaderShard:
        """Start a process for a member."""
        loader: Any = self.data.world(self.replicas)[rank]
        loader.gradient_state = GradientState(GradientAccumulationPlugin(num_steps=self.num_steps))
        loader.make_elastic(members, rank)
        loader.elastic.trains = self.trains
        self.loaders[rank], self.held[rank] = loader, []
        return loader

    def begin(self, seed: int | None = 0) -> None:
        """Begin an epoch on every member, each with the same random numbers."""
        self.iterators = {rank: iter(loader) for rank, loader in self.loaders.items()}
        self.seed = seed

    def next(self) -> bool:
        """Give every member its next micro-batch; return False at the end of the epoch."""
        batches: dict[int, Any] = {}
        for rank, iterator in self.iterators.items():
            if self.seed is not None:
                torch.manual_seed(self.seed)
            batches[rank] = next(iterator, None)
        self.seed = None
        if None in batches.values():
            assert all(batch is None for batch in batches.values()), "all members end together"
            return False
        self.rows = {rank: batch.tolist() for rank, batch in batches.items()}
        for rank, rows in self.rows.items():
            self.held[rank] += rows if self.loaders[rank].weight else []
        return True

    def gather_for_metrics(self) -> list[int]:
        """Return the real samples of the micro-batch, of the members that are present."""
        gathered: list[int] = []
        for place, rank in enumerate(sorted(self.loaders)):
            partial, rows = self.loaders[rank].partial_round, self.rows[rank]
            assert partial is None or (len(partial.counts), partial.rows) == (len(self.loaders), len(rows))
            gathered += rows if partial is None else rows[: partial.counts[place]]
        return gathered

    @property
    def closes(self) -> bool:
        (closes,) = {loader.closes_window for loader in self.loaders.values()}
        return closes

    @property
    def is_at_end(self) -> bool:
        (ended,) = {loader.end_of_dataloader for loader in self.loaders.values()}
        return ended

    def commit(self) -> None:
        """Make the step."""
        self.steps.append(sorted(sample for held in self.held.values() for sample in held))
        for rank, loader in self.loaders.items():
            self.held[rank] = []
            loader.commit()

    def lose(self, *lost: int) -> None:
        """End the processes of members."""
        for rank in lost:
            del self.loaders[rank], self.iterators[rank], self.held[rank]
        for loader in self.loaders.values():
            loader.change_members(tuple(self.loaders))

    def join(self, rank: int) -> None:
        """Start a replacement, which goes on from the position of a member."""
        state = copy.deepcopy(next(iter(self.loaders.values())).state_dict())
        others = tuple(self.loaders)
        loader = self.add(rank, (*others, rank))
        loader.load_state_dict(state)
        for other in others:
            self.loaders[other].change_members(tuple(self.loaders))
        self.iterators[rank] = iter(loader)

    def train(self, at: dict[int, Callable[[Members], None]] | None = None, seed: int = 0) -> list[list[int]]:
        """Train an epoch; `at` maps the number of a micro-batch, from 0 on, to what happens in its backward pass."""
        happenings = at or {}
        self.begin(seed)
        number = 0
        while self.next():
            if number in happenings:
                happenings[number](self)
            self.metrics += self.gather_for_metrics()
            if self.closes:
                self.commit()
            number += 1
        return self.steps
