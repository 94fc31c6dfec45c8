"""The index source of a loader whose samples are assigned to members that come and go."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, SubsetRandomSampler, WeightedRandomSampler

from ...runtime.loop.random import draw_seed
from .elastic import ElasticEpoch, MicroBatch
from .indices import IndexSource
from .orders import Order, OrderState, SynchronizedRandomSampler, read_order, sized_sampler
from .sharding import BatchSamplerShard


class ElasticIndices(IndexSource):
    """Yield the indices of this member's slices, from where the epoch stands.

    The plain loader reads ahead, so what it reads is planned first and taken when the training loop gets it. A change
    of members makes the plan void: the plain loader is opened again, in the order that the epoch has drawn.
    """

    def __init__(
        self, samples: BatchSamplerShard, order_state: OrderState, members: tuple[int, ...], rank: int
    ) -> None:
        super().__init__(samples, order_state)
        self.members = members
        self.rank = rank
        self.trains = False
        """Its micro-batches are trained on, and count with their step. Others count when the next one is requested."""
        self.is_collected = True
        """A collective has brought the results of the current micro-batch to all members, or of its epoch's end."""
        self.has_local_results = False
        """Results of an evaluation are on each member only: its micro-batches were read without a collective."""
        self.is_open = False
        """An epoch is being read."""
        self.is_stale = False
        """The members have changed since the plain loader was opened."""
        self.current: MicroBatch | None = None
        """The micro-batch that the training loop got last."""
        self.before_window: Callable[[], None] | None = None
        """Called when a training loop asks for the first micro-batch of a window: the place to change members."""
        self.agree_on_seed: Callable[[int], int] | None = None
        """Return one seed of all members' seeds, for a shuffled epoch; None lets the sampler broadcast it."""
        self.first_seed: int | None = None
        """The seed that the run has begun with; part of the position, so that a run that is resumed goes on with it."""
        self._epoch: ElasticEpoch | None = None
        self._order: Order | None = None
        self._has_drawn_end = False
        self._planned: deque[MicroBatch] = deque()

    @property
    def epoch(self) -> ElasticEpoch:
        """Return the epoch that is read."""
        assert self._epoch is not None
        return self._epoch

    def begin_epoch(self, epoch: ElasticEpoch) -> None:
        """Begin another epoch, whose order is drawn with its first indices."""
        self._epoch, self._order, self.current = epoch, None, None
        self.is_open, self._has_drawn_end = True, False
        self.renew()

    def renew(self) -> None:
        """Plan again from where the epoch stands, for a plain loader that is about to be opened."""
        self._planned = deque()
        self._drawn = None
        self.is_stale = False

    def end_epoch(self, epoch: ElasticEpoch) -> None:
        """End an epoch, unless another one has begun."""
        if self._epoch is epoch:
            self.is_open = False
            self._leave_micro_batch()

    def take(self) -> None:
        """Take the micro-batch whose samples the plain loader has returned."""
        self._leave_micro_batch()
        self.current, self.is_collected = self._planned.popleft(), False
        self.epoch.take(self.current)

    def _leave_micro_batch(self) -> None:
        self.has_local_results |= not self.trains and not self.is_collected
        self.is_collected = True

    def collect(self) -> None:
        """Take note that members have exchanged data, with the results of all micro-batches up to now."""
        self.is_collected, self.has_local_results = True, False

    def change_members(self, members: tuple[int, ...]) -> None:
        """Divide samples among these members from now on."""
        self.members = members
        if self.is_open:
            self.epoch.change_members(members)
            self.is_stale = True

    def reach_window(self) -> None:
        """Call `before_window`, if this loader is trained on."""
        if self.trains and self.before_window is not None:
            self.before_window()

    def _indices(self) -> Iterator[Any]:
        if self._order is None:
            self._order = self._draw_order()
        order, epoch, planned = self._order, self.epoch, self._planned
        for batch in epoch.stream():
            if batch.closes and batch.next_round >= epoch.rounds and not self._has_drawn_end:
                self._has_drawn_end = True
                order.finish()
            planned.append(batch)
            yield order.at(batch.read_by(self.rank) % epoch.total).tolist()

    def _draw_order(self) -> Order:
        key, self.key, self.start = self.key, None, 0
        self.order_state.begin_epoch(key)
        sampler = drawable_sampler(self.samples.batch_sampler)
        if not key and self.agree_on_seed is not None and isinstance(sampler, SynchronizedRandomSampler):
            sampler.set_next_seed(self.agree_on_seed(draw_seed()))
        return read_order(sampler)


def drawable_sampler(batch_sampler: object) -> Any:
    """Return the sampler of a plain `BatchSampler` if a whole epoch of it can be drawn at once; else None."""
    if type(batch_sampler) is BatchSampler and type(batch_sampler.sampler) in _DRAWN_AT_ONCE:
        return batch_sampler.sampler
    return sized_sampler(batch_sampler)


_DRAWN_AT_ONCE = (WeightedRandomSampler, SubsetRandomSampler)
