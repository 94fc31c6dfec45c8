"""Members come and go; every position of the epoch is in exactly one step, and in the step it belongs to."""

from __future__ import annotations

from itertools import chain
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.utils.data import BatchSampler, SequentialSampler

from meshwright import BatchSamplerShard, SeedableRandomSampler
from meshwright.data.order.elastic import ElasticEpoch, MicroBatch
from meshwright.data.order.elastic_indices import ElasticIndices
from meshwright.data.order.orders import OrderState
from tests.sizes import sized

BOUNDED = settings(
    max_examples=sized(gate=300, nightly=50_000),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
EPOCHS = st.fixed_dictionaries(
    {
        "replicas": st.integers(1, 6),
        "share": st.integers(1, 5),
        "total": st.integers(1, 60),
        "start": st.integers(0, 20),
        "rounds": st.integers(0, 8),
        "rounds_per_window": st.integers(1, 4),
    }
)


class World:
    """Members that each have an elastic epoch of their own, and the positions that their gradients hold."""

    def __init__(self, epoch: dict[str, int]) -> None:
        self.epoch = epoch
        self.round_size = epoch["replicas"] * epoch["share"]
        self.epochs = {
            rank: ElasticEpoch(**epoch, members=range(epoch["replicas"])) for rank in range(epoch["replicas"])
        }
        self.streams = {rank: elastic.stream() for rank, elastic in self.epochs.items()}
        self.gradients: dict[int, list[int]] = {rank: [] for rank in self.epochs}
        self.steps: list[list[int]] = []

    @property
    def first(self) -> ElasticEpoch:
        return next(iter(self.epochs.values()))

    def take(self, *only: int) -> None:
        """Give the next micro-batch to every member, or to some."""
        taken: dict[int, MicroBatch] = {rank: next(self.streams[rank]) for rank in only or self.epochs}
        assert len({batch.members for batch in taken.values()}) == 1
        for rank, batch in taken.items():
            self.epochs[rank].take(batch)
            own = batch.slice_of(rank).tolist()
            assert len(own) <= self.epoch["share"]
            assert len(batch.read_by(rank)) == max(1, len(own))
            self.gradients[rank] += own
        assert len({self.epochs[rank].closes for rank in taken}) == 1, "all members take equally many micro-batches"

    def reduce(self) -> None:
        self.steps.append(sorted(chain(*self.gradients.values())))
        for rank in self.epochs:
            self.gradients[rank] = []

    def commit(self, *only: int) -> None:
        for rank in only or self.epochs:
            self.epochs[rank].commit()

    def lose(self, lost: set[int]) -> None:
        for rank in lost:
            del self.epochs[rank], self.streams[rank], self.gradients[rank]
        self._replan()

    def join(self, new: set[int]) -> None:
        done = min(len(self.steps) * self.epoch["rounds_per_window"], self.epoch["rounds"])
        position = {
            "start": self.epoch["start"] + done * self.round_size,
            "rounds": self.epoch["rounds"] - done,
        }
        for rank in new:
            self.epochs[rank] = ElasticEpoch(**self.epoch | position, members=())
            self.gradients[rank] = []
        self._replan()

    def _replan(self) -> None:
        for rank, elastic in self.epochs.items():
            elastic.change_members(self.epochs)
            self.streams[rank] = elastic.stream()

    def windows(self) -> list[list[int]]:
        """Return the positions of every step of a run without losses."""
        length = self.epoch["rounds_per_window"] * self.round_size
        first, end = self.epoch["start"], self.epoch["start"] + self.epoch["rounds"] * self.round_size
        return [list(range(begin, min(begin + length, end))) for begin in range(first, end, length)]


@BOUNDED
@given(epoch=EPOCHS, chance=st.sampled_from([0.0, 0.1, 0.3, 0.6]), random=st.randoms(use_true_random=False))
def test_steps_have_the_samples_of_a_run_without_losses(epoch: dict[str, int], chance: float, random: Random) -> None:
    world = World(epoch)

    def some_die() -> bool:
        if len(world.epochs) == 1 or random.random() >= chance:
            return False
        lost = set(random.sample(sorted(world.epochs), random.randint(1, len(world.epochs) - 1)))
        world.lose(lost)
        return True

    while not world.first.ended:
        world.take()
        while some_die():
            pass
        if not world.first.closes:
            continue
        world.reduce()
        if some_die_ahead(world, random, chance):
            continue
        world.commit()
        absent = sorted(set(range(epoch["replicas"])) - set(world.epochs))
        if absent and random.random() < 0.5:
            world.join(set(random.sample(absent, random.randint(1, len(absent)))))
    assert world.steps == world.windows()
    assert world.first.at_boundary


def some_die_ahead(world: World, random: Random, chance: float) -> bool:
    """Let some members complete a step and take the next window, before the others hear of the step, and one dies."""
    if len(world.epochs) < 3 or world.first.ended or random.random() >= chance:
        return False
    lost, ahead, *behind = random.sample(sorted(world.epochs), len(world.epochs))
    for ranks in ((ahead,), (lost, *behind)):  # those behind take the same window, and only then change members
        world.commit(*ranks)
        while True:
            world.take(*ranks)
            if world.epochs[ranks[0]].closes:
                break
    world.lose({lost})
    return True


@BOUNDED
@given(epoch=EPOCHS, drop_last=st.booleans(), split=st.booleans())
def test_with_all_replicas_present_the_slices_are_the_shares_of_ranks(
    epoch: dict[str, Any], drop_last: bool, split: bool
) -> None:
    replicas, share, total = epoch["replicas"], epoch["share"], epoch["total"]
    batch_size = share * replicas if split else share
    start = min(epoch["start"], total // batch_size)
    batches = BatchSampler(SequentialSampler(range(total)), batch_size, drop_last)
    shards = [BatchSamplerShard(batches, replicas, rank, split) for rank in range(replicas)]
    elastic = ElasticEpoch(
        **epoch | {"start": start * batch_size, "rounds": shards[0].num_rounds_from(start)}, members=range(replicas)
    )
    micro_batches = list(elastic.stream())
    for rank, shard in enumerate(shards):
        assert [(b.slice_of(rank) % total).tolist() for b in micro_batches] == list(shard.iterate_from(start))
    closing = [number for number, batch in enumerate(micro_batches, start=1) if batch.closes]
    assert all(number % epoch["rounds_per_window"] == 0 or number == elastic.rounds for number in closing)


def test_a_lost_share_is_assigned_to_the_rest_before_the_window_closes() -> None:
    elastic = ElasticEpoch(replicas=4, share=6, total=48, start=0, rounds=2, rounds_per_window=1, members=range(4))
    elastic.take(next(elastic.stream()))
    assert elastic.closes
    elastic.change_members([0, 1, 3])
    assert not elastic.closes, "the step is owed the share of rank 2"
    lost, *second = elastic.stream()
    assert [lost.slice_of(rank).tolist() for rank in (0, 1, 3)] == [[12, 13], [14, 15], [16, 17]]
    assert [len(batch.slice_of(rank)) for batch in second for rank in (0, 1, 3)] == [4] * 6
    assert [batch.closes for batch in (lost, *second)] == [True, False, True]


def test_a_member_without_positions_reads_one_of_another() -> None:
    elastic = ElasticEpoch(replicas=4, share=1, total=4, start=0, rounds=1, rounds_per_window=1, members=range(4))
    elastic.take(next(elastic.stream()))
    elastic.change_members([0, 1])
    (batch,) = elastic.stream()
    elastic.take(batch)
    elastic.change_members([0])
    assert [(b.slice_of(0).tolist(), b.read_by(0).tolist()) for b in elastic.stream()] == [([1], [1]), ([3], [3])]
    few = MicroBatch(members=(0, 1, 2), positions=np.array([7]), number=0, of=1, next_round=1)
    assert [few.slice_of(rank).tolist() for rank in range(3)] == [[7], [], []]
    assert [few.read_by(rank).tolist() for rank in range(3)] == [[7], [7], [7]]


def test_what_was_committed_is_not_assigned_again() -> None:
    elastic = ElasticEpoch(replicas=2, share=2, total=8, start=0, rounds=2, rounds_per_window=1, members=range(2))
    elastic.take(next(elastic.stream()))
    elastic.commit()
    assert elastic.committed_rounds == 1
    elastic.change_members([1])
    assert sorted(chain(*(batch.slice_of(1).tolist() for batch in elastic.stream()))) == [4, 5, 6, 7]


@pytest.mark.parametrize("members", [2, 3, 5, 7])
def test_a_window_takes_the_fewest_micro_batches(members: int) -> None:
    elastic = ElasticEpoch(
        replicas=8, share=4, total=1000, start=0, rounds=4, rounds_per_window=4, members=range(members)
    )
    assert len(list(elastic.stream())) == -(-4 * 8 // members)


def test_a_sampler_is_drawn_to_its_end_with_the_last_micro_batch_of_an_epoch() -> None:
    sampler = SeedableRandomSampler(range(8), data_seed=1)  # it counts its epochs where they end
    samples = BatchSamplerShard(BatchSampler(sampler, 2, drop_last=False))
    indices = ElasticIndices(samples, OrderState(sampler), members=(0,), rank=0)
    for epoch in (0, 1):  # one member of two is left, so that a window of two rounds takes four micro-batches
        indices.begin_epoch(
            ElasticEpoch(replicas=2, share=1, total=8, start=0, rounds=4, rounds_per_window=2, members=(0,))
        )
        read = [(index, sampler.epoch) for (index,) in indices]
        assert sorted(index for index, _ in read) == list(range(8))
        assert [seen for _, seen in read] == [epoch] * 7 + [epoch + 1]
