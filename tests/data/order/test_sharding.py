"""Shards of a global order: complete, disjoint, equal."""

from __future__ import annotations

from itertools import chain, product

import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from accelerate.data_loader import IterableDatasetShard
from meshwright import BatchSamplerShard

CASES = [
    (n, size, world, drop_last, even, split)
    for n, size, world, drop_last, even, split in product(
        range(14), (1, 2, 3, 4), (1, 2, 3, 4), (False, True), (False, True), (False, True)
    )
    if not split or size % world == 0
]


class OpaqueBatchSampler(BatchSampler):
    """A batch sampler that the library does not know and can only iterate over."""


class TwiceBatchSampler(OpaqueBatchSampler):
    """A batch sampler that makes other batches than its sampler and size tell."""

    def __len__(self) -> int:
        return 2 * super().__len__()


def shares(kind: type[BatchSampler], case: tuple[int, int, int, bool, bool, bool]) -> list[list[list[int]]]:
    n, size, world, drop_last, even, split = case
    batches = kind(SequentialSampler(range(n)), size, drop_last)
    return [list(BatchSamplerShard(batches, world, rank, split, even)) for rank in range(world)]


def test_every_sample_comes_once_plus_the_filling_that_even_batches_asks_for() -> None:
    for case in CASES:
        n, size, world, drop_last, even, split = case
        round_size = size if split else size * world
        steps = [list(chain(*step)) for step in zip(*shares(BatchSampler, case), strict=False)]
        seen = list(chain(*steps))
        everything = list(chain(*chain(*shares(BatchSampler, case))))
        if drop_last:
            assert sorted(everything) == list(range(n - n % round_size)), case
        elif even:
            assert seen[:n] == list(range(n)), case
            assert len(seen) == -(-n // round_size) * round_size, case
            assert all(sample == position % n for position, sample in enumerate(seen)), case
        else:
            assert sorted(everything) == list(range(n)), case


def test_ranks_take_equally_many_equally_large_steps_when_batches_are_even() -> None:
    for case in CASES:
        if case[3] or case[4]:
            sizes = [[len(batch) for batch in share] for share in shares(BatchSampler, case)]
            assert all(size == sizes[0] for size in sizes), case


def test_reading_by_position_equals_iterating() -> None:
    for case in CASES:
        assert shares(BatchSampler, case) == shares(OpaqueBatchSampler, case), case


def test_len_is_the_number_of_batches_of_this_rank() -> None:
    for n, size, world, drop_last, even, split in CASES:
        for rank in range(world):
            batches = BatchSampler(SequentialSampler(range(n)), size, drop_last)
            shard = BatchSamplerShard(batches, world, rank, split, even)
            assert len(shard) == len(list(shard))
            opaque = OpaqueBatchSampler(SequentialSampler(range(n)), size, drop_last)
            if not split:
                assert len(BatchSamplerShard(opaque, world, rank, split, even)) == len(shard)


def test_published_attributes() -> None:
    batches = BatchSampler(SequentialSampler(range(10)), 2, False)
    shard = BatchSamplerShard(batches, 2, 1)
    assert (shard.batch_size, shard.drop_last, shard.total_length) == (2, False, 5)
    assert (shard.num_processes, shard.process_index) == (2, 1)
    assert shard.sampler is batches.sampler


def test_batches_that_cannot_be_split_are_refused_with_the_size_that_works() -> None:
    batches = BatchSampler(SequentialSampler(range(10)), 3, False)
    with pytest.raises(ValueError, match=r"batch size \(3\) needs to be a round multiple"):
        BatchSamplerShard(batches, 2, 0, split_batches=True)
    with pytest.raises(ValueError, match=r"round multiple of the number of processes \(2\)"):
        IterableDatasetShard(Counting(4), batch_size=3, num_processes=2, split_batches=True)


class OddBatches:
    """Batches of different lengths, without a batch size."""

    def __iter__(self):
        return iter([[0], [1, 2, 3], [4, 5]])

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("n", [7, 8, 9, 10, 11])
def test_real_samples_are_counted_where_an_unknown_batch_sampler_makes_as_many_batches(n: int, drop_last: bool) -> None:
    unknown, known, more = (
        BatchSamplerShard(kind(SequentialSampler(range(n)), 4, drop_last), 2)
        for kind in (OpaqueBatchSampler, BatchSampler, TwiceBatchSampler)
    )
    assert unknown.real_samples_in_last_round(0) == known.real_samples_in_last_round(0) is not None
    assert more.real_samples_in_last_round(0) is None


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("start", [0, 3])
def test_a_long_order_is_read_in_blocks_and_its_sampler_ends_before_the_last_batch(start: int, even: bool) -> None:
    """Samplers of torch draw once more at its end."""
    n = 30_011
    order = list(RandomSampler(range(n), generator=torch.Generator().manual_seed(3)))
    for rank in range(3):
        generator = torch.Generator().manual_seed(3)
        sampler = RandomSampler(range(n), generator=generator)
        shard = BatchSamplerShard(BatchSampler(sampler, 4, False), 3, rank, even_batches=even)
        read, draws = [], []
        for batch in shard.iterate_from(start):
            read.append(batch)
            draws.append(hash(generator.get_state().numpy().tobytes()))
        parts = [range(first, first + 4) for first in range(4 * start + 4 * rank, n, 12)]
        assert read == [[order[position % n] for position in part if even or position < n] for part in parts]
        assert draws[0] == draws[-2] != draws[-1]


def test_batches_without_a_size_are_made_even_by_whole_batches() -> None:
    shards = [BatchSamplerShard(OddBatches(), 2, rank) for rank in range(2)]
    assert [list(shard) for shard in shards] == [[[0], [4, 5]], [[1, 2, 3], [0]]]
    assert [len(shard) for shard in shards] == [2, 2]
    assert [shard.counted_in_last_round for shard in shards] == [[2, 0]] * 2, "the filling is no sample"
    five = [list(BatchSamplerShard(OddBatches(), 5, rank)) for rank in range(5)]
    assert five == [[[0]], [[1, 2, 3]], [[4, 5]], [[0]], [[1, 2, 3]]]
    assert [list(BatchSamplerShard(OddBatches(), 3, rank)) for rank in range(3)] == [[[0]], [[1, 2, 3]], [[4, 5]]]
    batches = [list(BatchSamplerShard(OddBatches(), 2, rank, even_batches=False)) for rank in range(2)]
    assert batches == [[[0], [4, 5]], [[1, 2, 3]]]


def test_batches_without_a_size_go_on_in_the_middle() -> None:
    assert [list(BatchSamplerShard(OddBatches(), 2, rank).iterate_from(2)) for rank in range(2)] == [[[4, 5]], [[0]]]


class Counting(IterableDataset):
    def __init__(self, n: int) -> None:
        self.n = n
        self.epoch = -1

    def __iter__(self):
        return iter(range(self.n))

    def __len__(self) -> int:
        return self.n

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("n", [0, 1, 4, 7, 8, 9])
def test_iterable_data_is_shared_out_like_map_style_data(n: int, drop_last: bool) -> None:
    for split in (False, True):
        case = (n, 2, 2, drop_last, True, split)
        parts = [IterableDatasetShard(Counting(n), 2, drop_last, 2, rank, split) for rank in range(2)]
        assert [list(part) for part in parts] == [list(chain(*share)) for share in shares(BatchSampler, case)]
        assert [len(part) for part in parts] == [len(list(part)) for part in parts]


def test_the_epoch_is_handed_on_to_iterable_data() -> None:
    data = Counting(4)
    IterableDatasetShard(data, 2).set_epoch(3)
    assert data.epoch == 3
