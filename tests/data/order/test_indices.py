"""Samplers that begin at any batch."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, SequentialSampler

from meshwright.data.order.indices import IndexSource, SkipBatchSampler
from meshwright.data.order.orders import OrderState


def batches(drop_last: bool = False) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(7)), 2, drop_last)


def test_a_batch_sampler_without_its_first_batches() -> None:
    skipping = SkipBatchSampler(batches(), 1)
    assert list(skipping) == [[2, 3], [4, 5], [6]]
    assert (len(skipping), skipping.total_length) == (3, 4)
    assert (skipping.batch_size, skipping.drop_last) == (2, False)
    assert SkipBatchSampler(batches(True), 0).drop_last is True
    assert len(SkipBatchSampler(batches(), 9)) == 0
    assert list(SkipBatchSampler(batches())) == list(batches())
    assert (SkipBatchSampler([[1], [2]], 1).batch_size, SkipBatchSampler([[1]]).drop_last) == (None, False)
    assert SkipBatchSampler([[1]]).sampler is None


def test_a_sampler_can_be_set_and_the_users_own_stays() -> None:
    own = batches()
    skipping = SkipBatchSampler(own, 2)
    assert skipping.sampler is own.sampler
    skipping.sampler = SequentialSampler(range(5))
    assert list(skipping) == [[4]]
    assert len(list(own.sampler)) == 7


class Iterates:
    """Batches that can only be iterated over."""

    def __init__(self, *batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def test_it_begins_at_any_batch_once() -> None:
    for samples in (batches(), Iterates([0, 1], [2, 3], [4, 5], [6])):
        source = IndexSource(samples, OrderState(samples))
        assert len(source) == 4
        source.start = 3
        assert list(source) == [[6]]
        assert list(source) == [[0, 1], [2, 3], [4, 5], [6]], "the next epoch begins at its beginning"


def test_the_first_indices_may_be_drawn_before_the_rest() -> None:
    drawn = []

    class Tells(Iterates):
        def __iter__(self) -> Any:
            for each in self.batches:
                drawn.append(each)
                yield each

    samples = Tells([0, 1, 2], [3])
    source = IndexSource(samples, OrderState(samples))
    source.draw_first()
    assert drawn == [[0, 1, 2]]
    assert source.length_of_last_batch == 3
    assert list(source) == [[0, 1, 2], [3]]
    assert source.length_of_last_batch == 1
    numbers = Iterates(5, 6)
    source = IndexSource(numbers, OrderState(numbers))
    assert (list(source), source.length_of_last_batch) == ([5, 6], 0)
