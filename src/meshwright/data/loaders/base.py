"""The base class of prepared data loaders: sharding, device placement and resumable positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from ...errors import UnsupportedSettingError
from ...errors.callers import warn
from ...instruments import Instruments
from ...runtime import phases
from ...runtime.collectives.nested import find_batch_size, named_leaves, send_to_device
from ...runtime.devices import device as devices, xla
from ...runtime.loop.gradient_state import GradientState
from ...runtime.loop.progress import progress
from ..metrics import PartialRound
from ..order.elastic_indices import ElasticIndices
from ..order.indices import IndexSource
from ..order.orders import OrderState, innermost_sampler
from ..order.position import Position, PositionError
from ..order.sharding import shares_of
from ..plan import DataPlan
from .streams import IterableDatasetShard


class BatchDivision(Protocol):
    """What gives each of several ranks its part of every sequence in a batch."""

    def begin_batch(self, batch: Any) -> Any:
        """Return this rank's part of a batch."""

    def end_batch(self) -> None:
        """Take note that there are no more batches."""


@dataclass(slots=True)
class Cursor:
    """State that changes with every batch. Kept outside the loader because `DataLoader.__setattr__` is slow."""

    batches: int = 0
    """Base batches yielded in this epoch."""


class PreparedLoader(DataLoader[Any]):
    """Common behaviour of prepared loaders: the position, and its report to `GradientState`."""

    device: torch.device | None
    split_batches = False
    is_stateful = False
    """Whether this is also torchdata's `StatefulDataLoader`."""
    elastic: ElasticIndices | None = None
    """How samples are assigned to members that come and go; None where all ranks stay."""
    _is_accelerate_prepared = True

    def __init__(
        self,
        dataset: Any,
        *,
        device: torch.device | None,
        skip_batches: int,
        drops_last: bool,
        non_blocking: bool,
        iteration: int,
        num_processes: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.device = device
        self.skip_batches = skip_batches
        self.iteration = iteration
        self.num_processes = num_processes
        self.group: Any = None
        """The ranks that see different samples: None for all."""
        self.division: BatchDivision | None = None
        """What gives each of several ranks its part of a batch."""
        self.gradient_state = GradientState()
        self.end_of_dataloader = False
        self.remainder = -1
        self.partial_round: PartialRound | None = None
        """The current round, if it is not full."""
        self.order_state = OrderState(self.get_sampler())
        self.index_source = self._new_index_source(self._indices_to_read(super()._index_sampler))
        self._drop_last = drops_last
        self._non_blocking = non_blocking
        self.cursor = Cursor()
        self._is_in_epoch = False
        """An epoch has begun and not ended."""
        self._resume: Position | None = None
        self._start = 0
        self._current: object = None

    # --- properties -----------------------------------------------------------------------------------------------

    @property
    def _index_sampler(self) -> Any:
        """Give the plain loader our index source, which can start at any batch."""
        source = self.__dict__.get("index_source")
        return super()._index_sampler if source is None else source

    def _indices_to_read(self, indices: Any) -> Any:
        """Return the batch sampler, or sampler, that this process reads by, given that of the plain loader."""
        return indices

    def _new_index_source(self, samples: Any) -> IndexSource:
        return IndexSource(samples, self.order_state)

    @property
    def use_stateful_dataloader(self) -> bool:
        """Return whether this is also torchdata's `StatefulDataLoader`."""
        return self.is_stateful

    @property
    def base_dataloader(self) -> DataLoader[Any]:
        """Return the loader that reads the data: this one."""
        return self

    @property
    def batches(self) -> Any:
        """Return what yields batches of indices: the batch sampler, or a sampler in its place."""
        return self.sampler if self.batch_sampler is None else self.batch_sampler

    @property
    def data_makes_batches(self) -> bool:
        """Return whether an iterable data set yields complete batches. Each counts as one sample."""
        return self.batch_sampler is None and isinstance(self.dataset, IterableDataset)

    @property
    def total_batch_size(self) -> int:
        """Return the global batch size: the samples that all processes consume in one step."""
        raise NotImplementedError

    @property
    def batches_per_round(self) -> int:
        """Return the number of base batches per step."""
        return 1 if self.split_batches else self.num_processes

    @property
    def reads_per_round(self) -> int:
        """Return the number of batches that this process reads per step."""
        return 1

    def reads_of_batches(self, batches: int) -> int:
        """Return how many batches this process reads while all processes consume a number of base batches."""
        return batches * self.reads_per_round // self.batches_per_round

    def batches_of_reads(self, reads: int) -> int:
        """Return how many base batches all processes consume while this process reads a number of batches."""
        return reads * self.batches_per_round // self.reads_per_round

    @property
    def samples_per_read(self) -> int:
        """Return the number of samples in a full batch that this process reads."""
        return self.total_batch_size // self.num_processes

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skip_batches // self.batches_per_round)

    @property
    def base_batch_size(self) -> int | None:
        """Return the batch size of the plain loader."""
        raise NotImplementedError

    @property
    def total_dataset_length(self) -> int:
        """Return the number of samples in one epoch, over all processes."""
        source: Any = self.dataset.dataset if isinstance(self.dataset, IterableDatasetShard) else self.dataset
        sampler = self.get_sampler()
        sized = hasattr(sampler, "__len__") and not isinstance(source, IterableDataset)
        length = length_of(sampler if sized else source)
        if length is None:
            raise TypeError(f"{type(source).__name__} does not know its length.")
        return length

    def get_sampler(self) -> Any:
        """Return the sampler that determines the order."""
        return innermost_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler that determines the order, from the next epoch on."""
        holder: Any = self.batches
        while hasattr(holder, "batch_sampler"):
            holder = holder.batch_sampler
        holder.sampler = sampler
        self.order_state.sampler = sampler

    def plan(self) -> DataPlan:
        """Return how the data is sharded, in printable form."""
        try:
            samples: int | None = self.total_dataset_length
        except TypeError:
            samples = None
        steps = None if samples is None else length_of(self)
        return DataPlan(
            samples=samples,
            num_processes=self.num_processes,
            global_batch=self.total_batch_size,
            steps=steps,
            drops_last=self._drop_last,
            fills_last=self._fills_last(),
            mode=self._mode(),
        )

    def _fills_last(self) -> bool:
        return self.num_processes > 1

    def _mode(self) -> str:
        raise NotImplementedError

    # --- position -------------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, here and in the sampler and data set that take one."""
        self._is_in_epoch = False
        self._propagate_epoch(epoch)

    def _propagate_epoch(self, epoch: int) -> None:
        self.iteration = epoch
        notified: set[int] = set()
        parts: list[Any] = [self.batch_sampler, self.sampler, self.get_sampler(), self.dataset]
        parts.append(getattr(self.batch_sampler, "batch_sampler", None))
        for part in parts:
            if hasattr(part, "set_epoch") and id(part) not in notified:
                notified.add(id(part))
                part.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the global position as plain data; it is the same on every rank."""
        if self._resume is not None:
            return self._resume.to_dict()
        if not getattr(self, "in_order", True):
            warn(
                "A loader with in_order=False returns batches in the order its workers finish, so the number of "
                "batches does not identify them: this position may repeat some and leave out others.",
            )
        if not self._is_in_epoch:
            position = Position(
                epoch=self.iteration, batches=self.skip_batches, begun=False, order=self.order_state.key_of_next_epoch()
            )
        elif self._has_consumed_all():
            position = Position(epoch=self.iteration + 1, begun=False, order=self.order_state.key_of_next_epoch())
        else:
            position = Position(
                epoch=self.iteration,
                batches=self.cursor.batches,
                order=self.order_state.key(),
                dataset=self._dataset_state(),
            )
        first_seed = None if self.elastic is None else self.elastic.first_seed
        return {
            **replace(position, first_seed=first_seed).to_dict(),
            "batch_size": self.base_batch_size,
            "num_processes": self.num_processes,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume the next iteration from a position, which may come from another number of processes."""
        position = Position.from_dict(state_dict)
        position.batches_of(self.base_batch_size)  # fail early if it does not fit
        self._require_same_world_size(position)
        if self.elastic is not None and position.first_seed is not None:
            self.elastic.first_seed = position.first_seed
        self._resume = position
        self.iteration = position.epoch  # so that a loop over epochs can begin with it

    @property
    def is_in_epoch(self) -> bool:
        """Return whether an epoch has begun and not ended; it has begun from the first batch to the end of the loop."""
        return self._is_in_epoch

    @property
    def is_mid_epoch(self) -> bool:
        """Return whether an epoch has begun and has more batches."""
        return self._is_in_epoch and not self.end_of_dataloader

    def _has_consumed_all(self) -> bool:
        """Return whether a position after the last batch belongs to the next epoch."""
        return self.end_of_dataloader

    def rewind(self) -> None:
        """Restart the epoch of a loaded position at its first batch, in the same order."""
        if self._resume is not None:
            self._resume = replace(self._resume, batches=0, dataset=None)

    def _require_same_world_size(self, position: Position) -> None:
        """Raise `PositionError` if a position is not valid on this number of processes."""

    def _dataset_state(self) -> Any:
        """Return the own state of an iterable data set, as of the batches yielded."""
        return (
            self.dataset.states[-1] if isinstance(self.dataset, IterableDatasetShard) and self.dataset.states else None
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the running iterator, which belongs to this process."""
        return {**self.__dict__, "_iterator": None, "division": None}

    def reset(self) -> None:
        """Reset what the last iteration recorded about its end."""
        self.end_of_dataloader = False
        self.partial_round = None
        self.remainder = -1

    def begin(self) -> None:
        """Register this loader as active with `GradientState`."""
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """Unregister this loader from `GradientState`."""
        self.gradient_state._remove_dataloader(self)

    # --- iterating ------------------------------------------------------------------------------------------------

    def make_elastic(self, members: tuple[int, ...], rank: int) -> None:
        """Assign samples to the present members from the next epoch on; refuse where that is not possible."""
        raise UnsupportedSettingError(
            "dispatch_batches=True",
            "The main process reads for all others, and no rank can read what a lost one has not trained on.",
            "Use DataLoaderConfiguration(dispatch_batches=False) with a map-style data set.",
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.elastic is not None:
            if self._is_in_epoch and self._resume is None:  # left early: a new member begins with the next one, too
                self.set_epoch(self.iteration + 1)
            self.elastic.reach_window()
        resume, self._resume = self._resume, None
        if resume is not None:
            self._propagate_epoch(resume.epoch)
            self._start = resume.batches_of(self.base_batch_size)
        else:  # an epoch that was left early counts as finished
            self._propagate_epoch(self.iteration + 1 if self._is_in_epoch else self.iteration)
            self._start = self.skip_batches
        self._is_in_epoch = True
        self.cursor.batches = self._start
        self.reset()
        self.remainder = self._real_samples_in_last_round()
        self._before_epoch(resume)
        mine = self._current = object()
        self.begin()
        try:
            yield from self._seen(self._rounds(resume))
            self._is_in_epoch = False
            self.iteration += 1
        finally:
            if self._current is mine:  # an older iterator that is closed late must not end this one
                self.end()
                if self.division is not None:
                    self.division.end_batch()

    def _seen(self, rounds: Iterator[Any]) -> Iterator[Any]:
        """Let instruments see the loop, if there are any when it begins."""
        seen = self.gradient_state.instruments
        return self._seen_by(seen, rounds) if seen.watch_loops else rounds

    def _seen_by(self, seen: Instruments, rounds: Iterator[Any]) -> Iterator[Any]:
        completed = False
        for notify in seen.epoch_started:
            notify(self)
        try:
            for batch in rounds:
                for notify in seen.body_started:
                    notify(self, batch)
                yield batch
                for notify in seen.body_ended:
                    notify(self)
            completed = True
        finally:
            for notify in seen.epoch_ended:
                notify(self, completed)

    @property
    def phase(self) -> int:
        """The phase that waiting for a batch is counted as."""
        return phases.DATA

    def _before_epoch(self, resume: Position | None) -> None:
        """Run the collectives that precede an epoch."""

    def _rounds(self, resume: Position | None) -> Iterator[Any]:
        raise NotImplementedError

    def _real_samples_in_last_round(self) -> int:
        """Return the published `remainder`: 0 for a full last round, -1 if unknown."""
        raise NotImplementedError

    def _mark_last(self, partial: PartialRound | None) -> None:
        """Record that this is the last round."""
        self.end_of_dataloader = True
        self.partial_round = partial
        if partial is not None:
            self.remainder = sum(partial.counts) % self.total_batch_size

    def _shares_of(self, num_real: int) -> list[int]:
        """Return how many of the real samples in a round every rank has."""
        return shares_of(num_real, self.total_batch_size // self.num_processes, self.num_processes)

    def _partial_round(self, counts: list[int], batch: Any = None) -> PartialRound | None:
        """Describe a round, and this rank's batch in it, by the real samples of every rank; None if it is full.

        Batches that the data set makes itself may have any length, so no round of them is known to be full.
        """
        if self.base_batch_size is None and not self.data_makes_batches:  # batches of any length
            rows = find_batch_size(batch) or 1
            return PartialRound(counts=counts, full=max(counts), rows=rows, uneven=True, group=self.group)
        share = self.total_batch_size // self.num_processes
        if min(counts) == share and not (self.data_makes_batches and self.num_processes > 1):
            return None
        filled = self._fills_last()
        rows = share if filled else counts[self._data_rank()]
        alike = filled and not self.data_makes_batches
        return PartialRound(counts=counts, full=share, rows=rows, uneven=not alike, group=self.group)

    def _data_rank(self) -> int:
        """Return this process's rank among those that see different samples."""
        return 0

    def _open(self, resume: Position | None) -> Iterator[Any]:
        """Start the plain loader at `_start`. A resumed epoch leaves torch's generator as it is."""
        if isinstance(self.dataset, IterableDatasetShard):
            return self._open_stream(self.dataset, resume)
        if isinstance(self.dataset, IterableDataset):  # given to the class directly, without `prepare`
            return self._fast_forward(super().__iter__())
        self.index_source.start = self._index_start(self._start)
        if resume is None:
            return super().__iter__()
        self.index_source.key = resume.order
        if not resume.begun and "generator" in resume.order:
            # Saved between two epochs: the loader has not drawn from this generator yet.
            self.order_state.begin_epoch(self.index_source.key)
            self.index_source.key = None
        with generator_restored() if resume.begun else nullcontext():
            batches: Iterator[Any] = super().__iter__()
            if resume.begun and self.num_workers == 0:  # workers have drawn their first indices by now
                self.index_source.draw_first()
            return batches

    def _open_stream(self, stream: IterableDatasetShard, resume: Position | None) -> Iterator[Any]:
        """Start an iterable data set at its position: from its own state, or by reading and dropping samples."""
        stream.begin(keep_states=self.num_workers == 0 and stream.has_state)
        if resume is None and self._start == 0:
            return super().__iter__()
        with generator_restored() if resume is not None and resume.begun else nullcontext():
            seeks = self._seek_stream(stream, resume)
            batches: Iterator[Any] = super().__iter__()
            if resume is not None and resume.begun and self.num_workers == 0:
                self.index_source.key = resume.order  # the epoch began with that state of torch's generator
                self.index_source.draw_first()
            return batches if seeks else self._fast_forward(batches)

    def _seek_stream(self, stream: IterableDatasetShard, resume: Position | None) -> bool:
        """Move a stream to the position. Return False if the loader has to read and drop batches instead."""
        if resume is not None and resume.dataset is not None and stream.keeps_states:
            stream.seek(resume.dataset, resume.order.get("rng"))
            return True
        if resume is not None and self._start > 0:
            self._warn_of_fast_forward(stream)
        if self.num_workers == 0 or (self.num_workers == 1 and not self.persistent_workers):
            stream.samples_to_skip = self._stream_start() * stream.batch_size
            stream.rng_while_skipping = resume.order.get("rng") if resume is not None else None
            return True
        if resume is not None and resume.num_processes != self.num_processes:
            raise PositionError(
                f"An iterable data set with {self.num_workers} workers reads batches by worker, so its position "
                f"is valid for {resume.num_processes} processes only and this run has {self.num_processes}. "
                f"Resume on {resume.num_processes}, or use at most one worker, not a persistent one."
            )
        return False

    def _fast_forward(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Read and drop the batches before the position."""
        for _ in progress(range(self.reads_of_batches(self._start)), "Reading on to the position", "batches"):
            next(batches, None)
        return batches

    def _warn_of_fast_forward(self, stream: IterableDatasetShard) -> None:
        remedy = (
            "use num_workers=0 or torchdata's loader (use_stateful_dataloader=True), where its state can be kept"
            if stream.has_state
            else "give it state_dict() and load_state_dict()"
        )
        warn(
            f"{type(stream.dataset).__name__} is read from its beginning to come back to batch {self._start} of epoch "
            f"{self.iteration}. To seek instead, {remedy}, or use a map-style data set.",
        )

    def _stream_start(self) -> int:
        """Return the number of consumed batches of an iterable data set."""
        return self._start

    def _index_start(self, batches: int) -> int:
        """Return the start of the index source after this many base batches."""
        return batches

    def _snapshot_state(self) -> None:
        """Save the state before a batch is prefetched, because it is not consumed yet."""

    def _placement(self) -> Callable[[Any], Any] | None:
        place, division, seen = self._device_placement(), self.division, self.gradient_state.instruments
        if division is None and not seen.batch_read:
            return place

        def place_batch(batch: Any) -> Any:
            for notify in seen.batch_read:
                notify(self, batch)
            placed = batch if place is None else place(batch)
            return placed if division is None else division.begin_batch(placed)

        return place_batch

    def _device_placement(self) -> Callable[[Any], Any] | None:
        device = self.device
        if device is None or devices.is_cpu(device):
            return None  # batches are made on the CPU

        if devices.is_xla(device):
            return self._place_on_xla

        def place(batch: Any) -> Any:
            # A copy may wait for the device, and so for the rest of the last step and for slower ranks.
            with phases.during(phases.WAITING):
                return send_to_device(batch, device, non_blocking=self._non_blocking)

        return place

    def _place_on_xla(self, batch: Any) -> Any:
        """End the graph of the last batch, move the next one, and shard it."""
        with phases.during(phases.WAITING):
            xla.loop.close_batch()
            placed = send_to_device(batch, self.device, self._non_blocking)  # type: ignore[arg-type]
            xla.loop.open_batch(named_leaves(placed))
            return placed


@contextmanager
def generator_restored() -> Iterator[None]:
    """Restore torch's generator on exit, because opening a loader draws from it."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def marking_last(items: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield every item with whether it is the last, reading one item ahead."""
    try:
        held = next(items)
    except StopIteration:
        return
    for item in items:
        yield held, False
        held = item
    yield held, True


def length_of(data: Any) -> int | None:
    """Return the length of data, or None if it has none or raises."""
    try:
        return len(data)
    except Exception:
        return None
