"""Loaders whose samples can be assigned to members that come and go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ...errors import UnsupportedSettingError
from ..metrics import PartialRound
from ..order.elastic import ElasticEpoch
from ..order.elastic_indices import ElasticIndices, drawable_sampler
from ..order.position import Position
from ..order.sharding import BatchSamplerShard
from .base import PreparedLoader, generator_restored


class ElasticLoader(PreparedLoader):
    """A prepared loader that can read an elastic epoch. See [Note: elastic epochs] in `data/order/elastic.py`.

    Members are nominal ranks. Every member calls `change_members` and `commit` at the same place of its training
    loop. The position of such a loader counts what was committed.
    """

    shard: BatchSamplerShard | None
    _presharded: bool

    def make_elastic(self, members: tuple[int, ...], rank: int) -> None:
        """Assign samples to the present members from the next epoch on; refuse where that is not possible."""
        self._require_elastic_samples()
        shard = self.index_source.samples
        indices = ElasticIndices(shard, self.order_state, members, rank)
        self.elastic = self.index_source = indices

    def _require_elastic_samples(self) -> None:
        if isinstance(self.dataset, IterableDataset):
            raise _refused("An iterable data set", "samples of it cannot be read by position.", "Use a map-style one.")
        if self._presharded:
            raise _refused(
                "Data that is already split by rank",
                "no other rank has the samples of a lost one.",
                "Give every rank the whole data set and let prepare() split it.",
            )
        if self.is_stateful:
            raise _refused("use_stateful_dataloader=True", "torchdata counts the batches of one process.", _LEAVE_OUT)
        shard = self.shard
        if shard is None or self.index_source.samples is not shard:
            raise _refused("This data loader", "its samples are not divided among ranks.", "Prepare it on many ranks.")
        if drawable_sampler(shard.batch_sampler) is None:
            culprit = shard.sampler if type(shard.batch_sampler) is BatchSampler else shard.batch_sampler
            raise _refused(
                f"The sampler {type(culprit).__name__}",
                "its samples can only be read one after the other, not by position.",
                "Use shuffle=True, or a sampler of torch, and a batch_size.",
            )
        if not shard.even_batches and not shard.drop_last:
            raise _refused("even_batches=False", "all members must take the same number of micro-batches.", _LEAVE_OUT)
        if not getattr(self, "in_order", True) and self.num_workers:
            raise _refused("in_order=False", "it is not known which samples a batch holds.", _LEAVE_OUT)
        if self.gradient_state.num_steps > 1 and not self.gradient_state.sync_with_dataloader:
            raise _refused("sync_with_dataloader=False", "a window must not hold samples of two epochs.", _LEAVE_OUT)

    # --- what the members do together -----------------------------------------------------------------------------

    def change_members(self, members: tuple[int, ...]) -> None:
        """Divide what is left, and what lost members took since the last commit, among these members.

        `closes_window` tells whether the open window has more micro-batches now.
        """
        indices = self._its_indices()
        indices.change_members(members)
        if indices.is_open:
            self._describe_micro_batch(indices)

    def commit(self) -> None:
        """Record that the step was made of the micro-batches since the last commit."""
        indices = self._its_indices()
        if indices.is_open:
            indices.epoch.commit()
            self.cursor.batches = self._start + indices.epoch.committed_rounds * self.batches_per_round

    @property
    def weight(self) -> float:
        """Return the samples of this member's micro-batch, as a part of its nominal share."""
        indices = self._its_indices()
        if indices.current is None:
            return 1.0
        return len(indices.current.slice_of(indices.rank)) / indices.epoch.share

    @property
    def closes_window(self) -> bool:
        """Return whether the micro-batch yielded last is the last of its accumulation window."""
        indices = self._its_indices()
        return indices.current is None or indices.epoch.closes

    @property
    def begins_window(self) -> bool:
        """Return whether the micro-batch yielded last is the first since the last commit."""
        return self._its_indices().epoch.begins

    def _its_indices(self) -> ElasticIndices:
        assert self.elastic is not None, "make_elastic() comes first"
        return self.elastic

    # --- reading --------------------------------------------------------------------------------------------------

    def _has_consumed_all(self) -> bool:
        if self.elastic is None or not self.end_of_dataloader:
            return self.end_of_dataloader
        return self.elastic.epoch.at_boundary

    def _elastic_rounds(self, indices: ElasticIndices, resume: Position | None) -> Iterator[Any]:
        place = self._placement()
        epoch = self._new_epoch(indices)
        indices.begin_epoch(epoch)
        batches = self._open(resume)
        try:
            while not epoch.ended:
                self._before_micro_batch(indices)
                if indices.is_stale:
                    del batches  # its workers end before others start
                    batches = self._open_again(indices)
                batch = next(batches)
                indices.take()
                self._describe_micro_batch(indices)
                self.gradient_state._activate_dataloader(self)
                yield batch if place is None else place(batch)
            next(batches, None)  # ends its workers
        finally:
            indices.end_epoch(epoch)

    def _new_epoch(self, indices: ElasticIndices) -> ElasticEpoch:
        shard = self.shard
        assert shard is not None
        assert shard.batch_size is not None
        return ElasticEpoch(
            replicas=shard.num_processes,
            share=shard.share,
            total=len(shard.sampler),
            start=self._start * shard.batch_size,
            rounds=shard.num_rounds_from(self._start),
            rounds_per_window=self.gradient_state.num_steps,
            members=indices.members,
        )

    def _before_micro_batch(self, indices: ElasticIndices) -> None:
        if not indices.trains:
            self.commit()
        elif indices.current is not None and indices.epoch.at_boundary:
            indices.reach_window()

    def _open_again(self, indices: ElasticIndices) -> Iterator[Any]:
        """Open the plain loader where the epoch stands, without a trace in the generators that it draws from."""
        indices.renew()
        with ExitStack() as stack:
            stack.enter_context(generator_restored())
            if isinstance(self.generator, torch.Generator):
                stack.enter_context(_restored(self.generator))
            return DataLoader.__iter__(self)

    def _describe_micro_batch(self, indices: ElasticIndices) -> None:
        """Record whether the micro-batch is the last, and how many samples of it each present member has."""
        epoch, batch = indices.epoch, indices.current
        if self.end_of_dataloader != epoch.ended:  # setting an attribute of a `DataLoader` is slow
            self.end_of_dataloader = epoch.ended
        if self.partial_round is not None:
            self.partial_round = None
        if batch is None or (batch.is_full(epoch.share) and batch.positions[-1] < epoch.total):
            return
        present = [member for member in batch.members if member in indices.members]
        rows = [len(batch.read_by(member)) for member in present]
        self.partial_round = PartialRound(
            counts=[int((batch.slice_of(member) < epoch.total).sum()) for member in present],
            full=epoch.share,
            rows=len(batch.read_by(indices.rank)),
            uneven=len(set(rows)) > 1,
            group=self.group,
        )


_LEAVE_OUT = "Leave it out."


def _refused(what: str, why: str, remedy: str) -> UnsupportedSettingError:
    return UnsupportedSettingError(what, f"replicas come and go in this run, and {why}", remedy)


@contextmanager
def _restored(generator: torch.Generator) -> Iterator[None]:
    state = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(state)
