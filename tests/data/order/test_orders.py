"""Orders that are the same on every process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler, SubsetRandomSampler

from meshwright import SeedableRandomSampler
from meshwright.data.order.orders import (
    OrderState,
    SynchronizedRandomSampler,
    read_order,
    sized_sampler,
    synchronized_sampler,
)
from tests.ranks import run_on_ranks


def test_a_synchronized_sampler_has_the_order_of_torchs_own() -> None:
    torch.manual_seed(3)
    expected = [list(RandomSampler(range(20))) for _ in range(2)]
    torch.manual_seed(3)
    sampler = SynchronizedRandomSampler(RandomSampler(range(20)))
    assert [list(sampler) for _ in range(2)] == expected


@pytest.mark.parametrize("options", [{"replacement": True}, {"replacement": True, "num_samples": 7}])
def test_replacement_and_number_of_samples_are_kept(options: dict[str, object]) -> None:
    torch.manual_seed(3)
    expected = list(RandomSampler(range(20), **options))
    torch.manual_seed(3)
    assert list(SynchronizedRandomSampler(RandomSampler(range(20), **options))) == expected


def order_after_different_random_numbers() -> list[int]:
    from meshwright import PartialState

    torch.manual_seed(PartialState(cpu=True).process_index)
    return list(SynchronizedRandomSampler(RandomSampler(range(50))))


def test_ranks_agree_even_when_their_generators_do_not() -> None:
    first, second, third = run_on_ranks(3, order_after_different_random_numbers)
    assert first == second == third
    assert sorted(first) == list(range(50))


def test_a_seedable_order_is_a_function_of_seed_and_epoch() -> None:
    sampler = SeedableRandomSampler(range(30), data_seed=5)
    epochs = [list(sampler), list(sampler)]
    assert epochs[0] != epochs[1], "each pass is a new epoch"
    torch.manual_seed(99)
    again = SeedableRandomSampler(range(30), data_seed=5)
    again.set_epoch(1)
    assert list(again) == epochs[1]
    assert list(SeedableRandomSampler(range(30), data_seed=6)) != epochs[0]
    assert SeedableRandomSampler(range(30)).initial_seed == torch.initial_seed()


def test_only_torchs_plain_random_sampler_is_replaced() -> None:
    subset = SubsetRandomSampler(range(4))
    choice = {"constant_memory": False, "data_seed": 1}
    assert synchronized_sampler(subset, seedable=True, **choice) is subset
    own_generator = RandomSampler(range(4), generator=torch.Generator())
    assert synchronized_sampler(own_generator, seedable=False, **choice) is own_generator
    seedable = synchronized_sampler(own_generator, seedable=True, **choice)
    assert isinstance(seedable, SeedableRandomSampler)
    assert seedable.generator is own_generator.generator


def test_known_orders_are_read_at_once_and_others_only_by_iterating() -> None:
    positions = np.array([4, 0, 2])
    assert read_order(SequentialSampler(range(5))).at(positions).tolist() == [4, 0, 2]
    torch.manual_seed(0)
    expected = list(RandomSampler(range(9)))
    torch.manual_seed(0)
    order = read_order(RandomSampler(range(9)))
    assert order.at(positions).tolist() == [expected[4], expected[0], expected[2]]
    assert len(order) == 9
    assert sized_sampler(BatchSampler(SequentialSampler(range(5)), 2, False)) is not None
    assert sized_sampler(BatchSampler(SubsetRandomSampler(range(5)), 2, False)) is None


class CountingSampler(Sampler[int]):
    """A sampler with a state of its own."""

    def __init__(self) -> None:
        self.drawn = 0

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]


def test_the_key_of_an_order_brings_it_back() -> None:
    own = CountingSampler()
    state = OrderState(own)
    own.drawn = 5
    state.begin_epoch(None)
    own.drawn = 9
    assert state.key() == {"sampler": {"drawn": 5}}
    state.restore(state.key())
    assert own.drawn == 5
    generator = torch.Generator().manual_seed(3)
    state = OrderState(RandomSampler(range(20), generator=generator))
    state.begin_epoch(None)
    first = torch.rand((), generator=generator)
    state.begin_epoch(state.key())
    assert torch.rand((), generator=generator) == first
    state = OrderState(SubsetRandomSampler(range(20)))
    state.begin_epoch(None)
    first = torch.rand(())
    state.restore(state.key())
    assert torch.rand(()) == first
    assert state.key_of_next_epoch() == {}, "torch's generator is that of the checkpoint"


class ForgetfulSampler(CountingSampler):
    """A sampler that tells its state and cannot take one."""

    load_state_dict = property()  # type: ignore[assignment]


def test_a_state_that_cannot_be_restored_is_no_key() -> None:
    state = OrderState(ForgetfulSampler())
    state.begin_epoch(None)
    assert set(state.key()) == {"rng"}


@pytest.mark.parametrize(
    "key",
    [
        {"seed": 7},
        {"seed": None, "initial_seed": 7},
        {"generator": torch.Generator().manual_seed(7).get_state()},
        {"sampler": {"drawn": 7}},
    ],
)
def test_a_key_of_another_kind_of_sampler_changes_nothing(key: dict[str, object]) -> None:
    samplers = [RandomSampler(range(20)), SequentialSampler(range(20))]
    for sampler in samplers if "seed" in key else [*samplers, SynchronizedRandomSampler(RandomSampler(range(20)))]:
        torch.manual_seed(3)
        expected = list(sampler)
        torch.manual_seed(3)
        OrderState(sampler).restore(key)
        assert list(sampler) == expected


def test_seeds_are_restored_where_the_sampler_has_one() -> None:
    seeded = SeedableRandomSampler(range(20), data_seed=5)
    OrderState(seeded).restore({"initial_seed": 6})
    assert list(seeded) == list(SeedableRandomSampler(range(20), data_seed=6))
    drawn = SynchronizedRandomSampler(RandomSampler(range(20)))
    expected = list(drawn)
    OrderState(drawn).restore({"seed": drawn.seed})
    assert list(drawn) == expected


def test_random_samplers_that_are_to_be_given_a_generator_are_kept() -> None:
    choice = {"constant_memory": False, "data_seed": None}
    plain = RandomSampler(range(4))
    assert synchronized_sampler(plain, seedable=False, keeps_torchs=True, **choice) is plain
    assert isinstance(synchronized_sampler(plain, seedable=False, **choice), SynchronizedRandomSampler)
    assert isinstance(synchronized_sampler(plain, seedable=True, keeps_torchs=True, **choice), SeedableRandomSampler)


ORDER_OF_1_15 = {
    "shuffled": [
        [[[9, 6, 0, 1], [7, 10, 8, 9]], [[6, 3, 9, 0], [1, 7, 8, 6]]],
        [[[4, 2, 5, 3], [6, 0, 1, 4]], [[4, 5, 10, 2], [3, 9, 0, 4]]],
    ],
    "split_batches": [
        [[[9, 6], [4, 2], [7, 10]], [[6, 3], [4, 5], [1, 7]]],
        [[[0, 1], [5, 3], [8, 9]], [[9, 0], [10, 2], [8, 6]]],
    ],
    "uneven": [
        [[[9, 6, 0, 1], [7, 10, 8]], [[6, 3, 9, 0], [1, 7, 8]]],
        [[[4, 2, 5, 3]], [[4, 5, 10, 2]]],
    ],
    "seedable": [
        [[[3, 0, 9, 2], [1, 7, 6, 3]], [[10, 9, 2, 4], [6, 8, 5, 10]]],
        [[[5, 8, 4, 10], [0, 9, 2, 5]], [[0, 1, 7, 3], [9, 2, 4, 0]]],
    ],
}
"""Kind of loader -> rank -> two epochs of `range(11)` in batches of 4 with the seed 7, seen under accelerate 1.15."""


def batches_in_the_order_of_1x() -> dict[str, list[list[list[int]]]]:
    from torch.utils.data import DataLoader

    from meshwright import Accelerator, DataLoaderConfiguration, set_seed

    found = {}
    for kind, options in {
        "shuffled": {},
        "split_batches": {"split_batches": True},
        "uneven": {"even_batches": False},
        "seedable": {"use_seedable_sampler": True},
    }.items():
        set_seed(7)
        config = DataLoaderConfiguration(order="accelerate-1", **options)
        loader = Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(range(11), 4, shuffle=True))
        found[kind] = [[batch.tolist() for batch in loader] for _ in range(2)]
    return found


def test_the_order_of_accelerate_1x_can_be_asked_for() -> None:
    assert run_on_ranks(2, batches_in_the_order_of_1x) == [
        {kind: ranks[rank] for kind, ranks in ORDER_OF_1_15.items()} for rank in (0, 1)
    ]
