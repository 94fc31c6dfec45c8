"""Loaders whose samples can be dealt out among members that come and go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ...errors import UnsupportedSettingError
from ..metrics import PartialRound
from ..order.dealing import Dealer
from ..order.dealt import DealtIndices, drawable_sampler
from ..order.position import Position
from ..order.sharding import BatchSamplerShard
from .base import PreparedLoader, generator_restored


class DealtLoader(PreparedLoader):
    """A prepared loader that can read by a dealer. See [Note: dealing] in `data/order/dealing.py`.

    Members are nominal ranks. Every member calls `change_members` and `commit` at the same place of its training
    loop. The position of such a loader counts what was committed.
    """

    shard: BatchSamplerShard | None
    _presharded: bool

    def enable_dealing(self, members: tuple[int, ...], rank: int) -> None:
        """Deal samples out among the present members from the next epoch on; refuse where that is not possible."""
        self._require_dealable()
        shard = self.index_source.samples
        dealing = DealtIndices(shard, self.order_state, members, rank)
        self.dealing = self.index_source = dealing

    def _require_dealable(self) -> None:
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
        """Deal among other members. What lost ones took since the last commit is dealt again, in the same window.

        `closes_window` tells whether the open window has more micro-batches now.
        """
        dealing = self._its_dealing()
        dealing.change_members(members)
        if dealing.is_open:
            self._describe_micro_batch(dealing)

    def commit(self) -> None:
        """Record that the step was made of the micro-batches since the last commit."""
        dealing = self._its_dealing()
        if dealing.is_open:
            dealing.dealer.commit()
            self.cursor.batches = self._start + dealing.dealer.committed_rounds * self.batches_per_round

    @property
    def weight(self) -> float:
        """Return the samples of this member's micro-batch, as a part of its nominal share."""
        dealing = self._its_dealing()
        if dealing.current is None:
            return 1.0
        return len(dealing.current.slice_of(dealing.rank)) / dealing.dealer.share

    @property
    def closes_window(self) -> bool:
        """Return whether the micro-batch yielded last is the last of its accumulation window."""
        dealing = self._its_dealing()
        return dealing.current is None or dealing.dealer.closes

    @property
    def begins_window(self) -> bool:
        """Return whether the micro-batch yielded last is the first since the last commit."""
        return self._its_dealing().dealer.begins

    def _its_dealing(self) -> DealtIndices:
        assert self.dealing is not None, "enable_dealing() comes first"
        return self.dealing

    # --- reading --------------------------------------------------------------------------------------------------

    def _has_consumed_all(self) -> bool:
        if self.dealing is None or not self.end_of_dataloader:
            return self.end_of_dataloader
        return self.dealing.dealer.at_boundary

    def _dealt_rounds(self, dealing: DealtIndices, resume: Position | None) -> Iterator[Any]:
        place = self._placement()
        dealer = self._new_dealer(dealing)
        dealing.begin_epoch(dealer)
        batches = self._open(resume)
        try:
            while not dealer.ended:
                self._before_micro_batch(dealing)
                if dealing.is_stale:
                    del batches  # its workers end before others start
                    batches = self._open_again(dealing)
                batch = next(batches)
                dealing.take()
                self._describe_micro_batch(dealing)
                self.gradient_state._activate_dataloader(self)
                yield batch if place is None else place(batch)
            next(batches, None)  # ends its workers
        finally:
            dealing.end_epoch(dealer)

    def _new_dealer(self, dealing: DealtIndices) -> Dealer:
        shard = self.shard
        assert shard is not None
        assert shard.batch_size is not None
        return Dealer(
            replicas=shard.num_processes,
            share=shard.share,
            total=len(shard.sampler),
            start=self._start * shard.batch_size,
            rounds=shard.num_rounds_from(self._start),
            rounds_per_window=self.gradient_state.num_steps,
            members=dealing.members,
        )

    def _before_micro_batch(self, dealing: DealtIndices) -> None:
        if not dealing.trains:
            self.commit()
        elif dealing.current is not None and dealing.dealer.at_boundary:
            dealing.reach_window()

    def _open_again(self, dealing: DealtIndices) -> Iterator[Any]:
        """Open the plain loader where the dealer stands, without a trace in the generators that it draws from."""
        dealing.renew()
        with ExitStack() as stack:
            stack.enter_context(generator_restored())
            if isinstance(self.generator, torch.Generator):
                stack.enter_context(_restored(self.generator))
            return DataLoader.__iter__(self)

    def _describe_micro_batch(self, dealing: DealtIndices) -> None:
        """Record whether the micro-batch is the last, and how many samples of it each present member has."""
        dealer, batch = dealing.dealer, dealing.current
        if self.end_of_dataloader != dealer.ended:  # setting an attribute of a `DataLoader` is slow
            self.end_of_dataloader = dealer.ended
        if self.partial_round is not None:
            self.partial_round = None
        if batch is None or (batch.is_full(dealer.share) and batch.positions[-1] < dealer.total):
            return
        present = [member for member in batch.members if member in dealing.members]
        rows = [len(batch.read_by(member)) for member in present]
        self.partial_round = PartialRound(
            counts=[int((batch.slice_of(member) < dealer.total).sum()) for member in present],
            full=dealer.share,
            rows=len(batch.read_by(dealing.rank)),
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
