"""The loader whose process reads its own shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset
from torch.utils.data.distributed import DistributedSampler

from ...config.enums import RNGType
from ...errors.callers import warn
from ...runtime import phases
from ...runtime.collectives.nested import find_batch_size
from ...runtime.collectives.operations import all_gather_single
from ...runtime.loop.random import synchronize_rng_states
from ..metrics import PartialRound
from ..order.indices import SkipBatchSampler
from ..order.orders import sized_sampler
from ..order.position import Position, PositionError
from ..order.sharding import BatchSamplerShard
from .base import PreparedLoader, generator_restored, length_of, marking_last
from .elastic import ElasticLoader
from .stateful import stateful_class
from .streams import BatchOfLastRound, IterableDatasetShard


class DataLoaderShard(ElasticLoader):
    """A loader whose process reads its own shard."""

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: Sequence[RNGType | str] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        _presharded: bool = False,
        _num_processes: int | None = None,
        **kwargs: Any,
    ) -> None:
        if use_stateful_dataloader:
            self.__class__ = stateful_class(type(self))
        shard = _shard_in(kwargs)
        if shard is not None:
            num_processes = shard.num_processes
        elif _num_processes is not None:
            num_processes = _num_processes
        else:
            num_processes = getattr(dataset, "num_processes", 1) if isinstance(dataset, IterableDatasetShard) else 1
        super().__init__(
            dataset,
            device=device,
            skip_batches=skip_batches,
            drops_last=_drop_last,
            non_blocking=_non_blocking,
            iteration=iteration,
            num_processes=num_processes,
            **kwargs,
        )
        self.shard = shard
        self.split_batches = bool(getattr(dataset if shard is None else shard, "split_batches", False))
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.joined = False
        """`join_uneven_inputs` handles ranks with fewer batches."""
        self._presharded = _presharded
        self._has_checked_steps = False
        self._own_samples_left: int | None = None

    @property
    def total_batch_size(self) -> int:
        """Return the samples that all processes consume in one step."""
        if self.shard is not None and self.shard.batch_size is not None:
            return self.shard.share * self.num_processes
        if isinstance(self.dataset, IterableDatasetShard) and not self._presharded:
            return self.dataset.round_size
        return (self.base_batch_size or 1) * self.num_processes

    @property
    def base_batch_size(self) -> int | None:
        """Return the samples of a batch of the plain loader."""
        if isinstance(self.dataset, IterableDatasetShard):
            return self.dataset.batch_size
        if self.batch_sampler is None:
            return getattr(self.sampler, "batch_size", 1)
        return getattr(self.batch_sampler, "batch_size", None)

    def _mode(self) -> str:
        if self._presharded:
            return "the data came already split by rank; used as it is"
        return "each process reads its own share"

    def _fills_last(self) -> bool:
        return super()._fills_last() and (self.shard is None or self.shard.even_batches)

    def _index_start(self, batches: int) -> int:
        return batches if self.shard is not None else batches // self.batches_per_round

    def _stream_start(self) -> int:
        return self._start // self.batches_per_round if self._presharded else self._start

    def _dataset_state(self) -> Any:
        return None if self._presharded else super()._dataset_state()  # it belongs to one rank only

    def _require_same_world_size(self, position: Position) -> None:
        """Refuse a position in presharded data on another number of ranks."""
        if self._presharded and position.batches and position.num_processes != self.num_processes:
            raise PositionError(
                f"This data was already split by rank, so its position is valid for {position.num_processes} "
                f"processes only and this run has {self.num_processes}: resume on {position.num_processes}."
            )

    def _before_epoch(self, resume: Position | None) -> None:
        if self.elastic is not None and resume is not None and resume.begun:
            return  # the other members are in this epoch already
        if self.rng_types is not None:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        if not self._has_checked_steps:
            self._has_checked_steps = True
            self._warn_of_uneven_steps()

    def _warn_of_uneven_steps(self) -> None:
        """Warn if ranks will take different numbers of steps, which hangs collectives in the last one."""
        shard = self.shard
        if shard is None or shard.even_batches or shard.drop_last or self.joined:
            return
        if not hasattr(shard.batch_sampler, "__len__"):
            return
        steps = [
            len(BatchSamplerShard(shard.batch_sampler, shard.num_processes, rank, shard.split_batches, False))
            for rank in (0, shard.num_processes - 1)
        ]
        if steps[0] != steps[1]:
            warn(
                f"With even_batches=False rank 0 takes {steps[0]} steps per epoch and rank {shard.num_processes - 1} "
                f"takes {steps[1]}: collectives in the last step would hang. Wrap the loop in "
                "accelerator.join_uneven_inputs([model]), or leave even_batches at True.",
            )

    def _real_samples_in_last_round(self) -> int:
        if self._drop_last:
            return -1
        if self.shard is not None:
            real = self.shard.real_samples_in_last_round(self._start)
            return -1 if real is None else real % self.total_batch_size
        try:
            return self.total_dataset_length % self.total_batch_size
        except TypeError:  # data of unknown length
            return -1

    @property
    def phase(self) -> int:
        """The phase that waiting for a batch is counted as."""
        return phases.WAITING if self._presharded else phases.DATA  # presharded ranks synchronise at every step

    def _rounds(self, resume: Position | None) -> Iterator[Any]:
        if self.elastic is not None:
            yield from self._elastic_rounds(self.elastic, resume)
            return
        place = self._placement()
        batches = self._open(resume)
        last = self._last_index()
        if self.is_stateful and (self._presharded or last is None):
            batches = self._snapshotting(batches)
        if self._presharded:
            yield from self._lockstep_rounds(batches, place)
            return
        step = self.batches_per_round
        cursor = self.cursor
        bring_forward = self.gradient_state._activate_dataloader
        if last is None:
            for batch, is_last in marking_last(batches):
                batch, self.partial_round = self._unmarked(batch, is_last)
                if is_last:
                    self._mark_last(self.partial_round)
                cursor.batches += step
                bring_forward(self)
                yield batch if place is None else place(batch)
            return
        for index, batch in enumerate(batches):
            if index == last:
                self._mark_last(self._partial_last_round(batch))
            cursor.batches += step
            bring_forward(self)
            yield batch if place is None else place(batch)

    def _snapshotting(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            self._snapshot_state()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def _last_index(self) -> int | None:
        """Return the index of the last batch, or None if the length cannot be trusted.

        Without it, one batch is prefetched to detect the end. That draws random numbers (augmentation) earlier than the
        plain loader would, and is avoided where possible.
        """
        if self.shard is not None:
            trusted = sized_sampler(self.shard.batch_sampler) is not None
            return self.shard.num_rounds_from(self._start) - 1 if trusted else None
        if sized_sampler(self.batches) is not None:
            return len(self.index_source) - self._index_start(self._start) - 1
        return None

    def _data_rank(self) -> int:
        return 0 if self.shard is None else self.shard.process_index

    def _partial_last_round(self, batch: Any) -> PartialRound | None:
        shard = self.shard
        if shard is None:
            if self.num_processes > 1 or isinstance(self.dataset, IterableDataset):
                return None  # counted by a collective, or by the stream itself
            real = self.remainder if self._last_index() is not None else self.index_source.length_of_last_batch
            return self._partial_round([real]) if 0 < real < self.total_batch_size else None
        real_samples = shard.real_samples_in_last_round(self._start)
        # The samples of other batch samplers are counted by iterating.
        counts = shard.counted_in_last_round if real_samples is None else self._shares_of(real_samples)
        if counts is None or not shard.takes_part_in_last_round(self._start):
            return None
        return self._partial_round(counts, batch)

    def _unmarked(self, batch: Any, is_last: bool) -> tuple[Any, PartialRound | None]:
        """Unwrap the last batch of a stream (one per worker), or count the samples of a sampler's last round."""
        if isinstance(batch, BatchOfLastRound):
            return batch.batch, self._partial_round(self._shares_of(batch.num_real))
        if self.data_makes_batches:
            return batch, self._partial_round(self._shares_of(self.total_batch_size))
        return batch, self._partial_last_round(batch) if is_last else None

    def _lockstep_rounds(self, batches: Iterator[Any], place: Callable[[Any], Any] | None) -> Iterator[Any]:
        """Iterate until every rank is exhausted. An exhausted rank repeats its last batch, with a count of 0.

        The ranks do not know the lengths of each other's data, so they exchange batch sizes at every step.
        """
        self._own_samples_left = _real_samples_of(self.get_sampler())
        if self._own_samples_left is not None:
            consumed = self._index_start(self._start) * (self.base_batch_size or 1)
            self._own_samples_left = max(0, self._own_samples_left - consumed)
        upcoming = next(batches, None)
        here = self._last_of_own_batches() if upcoming is None and self._start else upcoming
        more = self._gather_batch_sizes(upcoming)
        while any(more):
            counts, here = more, (upcoming if upcoming is not None else here)
            if here is None:
                raise ValueError(
                    "This rank has no data of its own while others have: give every rank at least one sample, or let "
                    "the library divide the data."
                )
            upcoming = next(batches, None)
            more = self._gather_batch_sizes(upcoming)
            full = max(counts)
            alike = all(count == full for count in counts)
            rows = find_batch_size(here) or 1
            uneven = PartialRound(counts=counts, full=full, rows=rows, uneven=True, group=self.group)
            partial = None if alike else uneven
            self.partial_round = partial
            if not any(more):
                self._mark_last(partial)
            self.cursor.batches += self.batches_per_round
            self.gradient_state._activate_dataloader(self)
            yield here if place is None else place(here)

    def _last_of_own_batches(self) -> Any:
        """Read again the last batch of this rank, whose data ended before the position; None if it has no data."""
        last = None
        with generator_restored():
            self.index_source.key = self.order_state.key()
            if not isinstance(self.dataset, IterableDataset):
                self.index_source.start = max(0, (length_of(self.index_source) or 0) - 1)
            for batch in super(PreparedLoader, self).__iter__():
                last = batch
        return last

    def _gather_batch_sizes(self, batch: Any) -> list[int]:
        """Return the number of samples in every rank's next batch; 0 for an exhausted rank."""
        own = 0 if batch is None else (find_batch_size(batch) or 1)
        if self._own_samples_left is not None:
            own = min(own, self._own_samples_left)
            self._own_samples_left -= own
        counts = [own]
        if self.num_processes > 1:
            tensor = torch.tensor([own], device=self.device or "cpu")
            gathered = tensor.new_empty(self.num_processes)
            all_gather_single(gathered, tensor, group=self.group)
            counts = gathered.tolist()  # one synchronisation with the device, not one for each rank
        return counts


def _shard_in(options: dict[str, Any]) -> BatchSamplerShard | None:
    found = options.get("batch_sampler") if options.get("batch_sampler") is not None else options.get("sampler")
    if isinstance(found, SkipBatchSampler):
        found = found.batch_sampler
    return found if isinstance(found, BatchSamplerShard) else None


def _real_samples_of(sampler: Any) -> int | None:
    """Return the number of samples a `DistributedSampler` has before its padding; None for other samplers."""
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return None
    return max(0, -(-(len(sampler.dataset) - sampler.rank) // sampler.num_replicas))  # type: ignore[arg-type]
