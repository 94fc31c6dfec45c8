"""Iterable data: every process reads it and keeps its shard; samples of an incomplete last round are marked."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset
from torch.utils.data._utils.pin_memory import pin_memory

from ...runtime.loop.progress import progress
from ..order.sharding import filled


@dataclass
class SampleOfLastRound:
    """A sample of an incomplete round, with the number of real samples in that round."""

    sample: Any
    num_real: int


@dataclass
class BatchOfLastRound:
    """A batch of an incomplete round, with the number of real samples in that round."""

    batch: Any
    num_real: int

    def pin_memory(self) -> BatchOfLastRound:
        """Pin the wrapped batch; called by the loader's pinning thread."""
        return BatchOfLastRound(pin_memory(self.batch), self.num_real)  # type: ignore[no-untyped-call]


class MarkingCollate:
    """Collate samples, and keep the mark of an incomplete round across the user's collate function."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, samples: Any) -> Any:
        """Collate a list of samples, or convert a single one."""
        first = samples[0] if isinstance(samples, list) and samples else samples
        if not isinstance(first, SampleOfLastRound):
            return self.collate_fn(samples)
        plain = [marked.sample for marked in samples] if isinstance(samples, list) else samples.sample
        return BatchOfLastRound(self.collate_fn(plain), first.num_real)


class IterableDatasetShard(IterableDataset[Any]):
    """One process's shard of an iterable data set that every process reads.

    An incomplete last round is padded with the first samples unless `drop_last`.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches and batch_size > 1 and batch_size % num_processes:
            raise ValueError(
                f"split_batches=True cuts each batch into equal parts: the batch size ({batch_size}) needs to be a "
                f"round multiple of the number of processes ({num_processes})."
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.fills_last_round = True
        self.reads_for_all = False
        """Yield the samples of all processes, in order, instead of those of one."""
        self.samples_to_skip = 0
        self.rng_while_skipping: torch.Tensor | None = None
        """State of torch's generator at the start of the epoch, for data that draws from it."""
        self.marks_last_round = False
        """Yield the samples of an incomplete round as `SampleOfLastRound`."""
        self.seeds_generator = False
        """Seed the data set's own generator with the epoch."""
        self.epoch = 0
        self.keeps_states = False
        """Save the data set's own state before every round."""
        self.states: deque[Any] = deque(maxlen=1)
        self._head: list[Any] = []
        """The samples of the first round, which pad the last one, if the iteration begins after it."""

    @property
    def has_state(self) -> bool:
        """Return whether the data set has `state_dict` and `load_state_dict`."""
        return hasattr(self.dataset, "state_dict") and hasattr(self.dataset, "load_state_dict")

    def begin(self, *, keep_states: bool) -> None:
        """Reset the state of earlier iterations."""
        self.keeps_states = keep_states
        self.states.clear()
        self.samples_to_skip = 0
        self.rng_while_skipping = None
        self._head = []

    def set_epoch(self, epoch: int) -> None:
        """Forward the epoch to the data set."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        total = len(self.dataset)
        if not self.fills_last_round and not self.drop_last:
            return total
        rounds = total // self.round_size if self.drop_last else -(-total // self.round_size)
        return rounds * (self.round_size if self.reads_for_all else self.share)

    @property
    def share(self) -> int:
        """Return the number of samples per process in a full round."""
        return self.batch_size // self.num_processes if self.split_batches else self.batch_size

    @property
    def round_size(self) -> int:
        """Return the number of samples over all processes in a full round."""
        return self.share * self.num_processes

    def __iter__(self) -> Iterator[Any]:
        mine = slice(self.process_index * self.share, (self.process_index + 1) * self.share)
        mine = slice(None) if self.reads_for_all else mine
        head = self._head
        if self.seeds_generator:
            self._seed_generator()
        samples = iter(self.dataset)
        if self.samples_to_skip:
            head = self._fast_forward(samples)
        while True:
            if self.keeps_states:
                self.states.append(copy.deepcopy(self.dataset.state_dict()))
            gathered = list(islice(samples, self.round_size))
            if not gathered:
                return
            head = head if len(head) >= self.round_size else head + gathered
            if len(gathered) == self.round_size:
                yield from gathered[mine]
                continue
            if self.drop_last:
                return
            num_real = len(gathered)
            last = filled(gathered, head, self.round_size) if self.fills_last_round else gathered
            for sample in last[mine]:
                yield SampleOfLastRound(sample, num_real) if self.marks_last_round else sample
            return

    def _seed_generator(self) -> None:
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)

    def seek(self, state: Any, rng: torch.Tensor | None) -> None:
        """Begin the next iteration at a state of the data set; the first round, which pads the last, is read before.

        Args:
            state: The data set's state.
            rng: The state of torch's generator with which the epoch began.
        """
        if self.fills_last_round:
            with _drawing_from(rng):
                self._head = list(islice(iter(self.dataset), self.round_size))
        self.dataset.load_state_dict(state)

    def _fast_forward(self, samples: Iterator[Any]) -> list[Any]:
        """Read and drop the samples before the position; return the first round, which pads the last one."""
        skip, self.samples_to_skip = self.samples_to_skip, 0
        rng, self.rng_while_skipping = self.rng_while_skipping, None
        head: list[Any] = []
        with _drawing_from(rng):
            for _ in progress(range(skip), "Reading on to the position of the resumed run", unit="samples"):
                sample = next(samples, None)
                if len(head) < self.round_size:
                    head.append(sample)
        return head


@contextmanager
def _drawing_from(rng: torch.Tensor | None) -> Iterator[None]:
    """Let torch's generator begin at a state, and restore it on exit; None changes nothing."""
    before = torch.get_rng_state()
    if rng is not None:
        torch.set_rng_state(rng)
    try:
        yield
    finally:
        if rng is not None:
            torch.set_rng_state(before)
