"""Orders that are the same on every process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler

from accelerate.data.order.orders import SynchronizedRandomSampler, read_order, sized_sampler, synchronized_sampler
from accelerate.data_loader import SeedableRandomSampler
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
    from accelerate import PartialState

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
