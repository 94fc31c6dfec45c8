"""Seeds and generators: reproducible on one process, equal or different across processes as asked."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import RandomSampler

from meshwright import PartialState
from meshwright.config.enums import RNGType
from meshwright.runtime.loop.random import set_seed, shared_seed, synchronize_rng_state, synchronize_rng_states
from tests.ranks import ranks


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def on_all_ranks(value: Any) -> list[Any]:
    values: list[Any] = [None] * PartialState().num_processes
    dist.all_gather_object(values, value)
    return values


def test_a_seed_makes_all_generators_repeat() -> None:
    set_seed(42)
    first = draw()
    assert draw() != first
    set_seed(42)
    assert draw() == first
    set_seed(43)
    assert all(new != old for new, old in zip(draw(), first, strict=True))


def test_the_numbers_are_those_of_the_plain_generators() -> None:
    set_seed(7)
    drawn = draw()
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    assert draw() == drawn


@pytest.mark.parametrize("seed", [2**32 + 5, 2**40])
def test_large_seeds_are_taken(seed: int) -> None:
    set_seed(seed)
    first = draw()
    set_seed(seed)
    assert draw() == first


def test_deterministic_algorithms_on_request() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    try:
        set_seed(1)
        assert torch.are_deterministic_algorithms_enabled() == before
        set_seed(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(before)


@ranks(3)
def test_ranks_draw_alike_unless_the_seed_is_device_specific() -> None:
    PartialState()
    set_seed(5)
    assert len(set(on_all_ranks(draw()))) == 1
    set_seed(5, device_specific=True)
    drawn = on_all_ranks(draw())
    for generator in zip(*drawn, strict=True):
        assert len(set(generator)) == 3
    set_seed(6)
    assert draw() == drawn[1], "the seed of rank 1 is one more"


@ranks(3)
def test_synchronised_generators_continue_as_those_of_rank_zero() -> None:
    rank = PartialState().process_index
    torch.manual_seed(100 + rank)
    before = on_all_ranks(torch.get_rng_state().tolist())
    assert before[0] != before[1]
    synchronize_rng_states(["torch"])
    assert torch.get_rng_state().tolist() == before[0]
    assert len(set(on_all_ranks(torch.rand(()).item()))) == 1

    torch.manual_seed(100 + rank)
    synchronize_rng_state()
    assert torch.get_rng_state().tolist() == before[0], "torch's generator is the one meant without a name"


@ranks(2)
def test_a_generator_of_the_users_own_is_synchronised_alone() -> None:
    rank = PartialState().process_index
    torch.manual_seed(rank)
    generator = torch.Generator().manual_seed(50 + rank)
    synchronize_rng_states([RNGType.GENERATOR], generator)
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(50).get_state())
    assert torch.initial_seed() == rank


@ranks(2)
def test_generators_that_are_not_there_are_refused() -> None:
    rank = PartialState().process_index
    with pytest.raises(ValueError, match="needs the generator to synchronise"):
        synchronize_rng_state("generator")
    for name in ("cuda", "dice"):
        with pytest.raises(
            ValueError, match=f"Rank {rank} .* the '{name}' generator, but runs on cpu: choose from torch"
        ):
            synchronize_rng_state(name)


def test_a_single_process_keeps_its_generators() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    synchronize_rng_states(["torch", "cuda", "generator"])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_shared_seed_takes_from_the_generator_what_a_random_sampler_takes() -> None:
    torch.manual_seed(11)
    sampler = iter(RandomSampler(range(100)))
    order = [next(sampler), *sampler]
    after_sampler = torch.get_rng_state()

    torch.manual_seed(11)
    seed = shared_seed()
    assert torch.equal(torch.get_rng_state(), after_sampler)
    generator = torch.Generator().manual_seed(seed)
    assert list(RandomSampler(range(100), generator=generator)) == order


@ranks(3)
def test_a_shared_seed_is_that_of_rank_zero_and_every_rank_moves_on_alike() -> None:
    rank = PartialState().process_index
    torch.manual_seed(20 + rank)
    seeds = [shared_seed(), shared_seed()]
    assert len({tuple(theirs) for theirs in on_all_ranks(seeds)}) == 1
    assert seeds[0] != seeds[1]

    after = torch.get_rng_state()
    expected = torch.Generator().manual_seed(20)
    drawn = [int(torch.empty((), dtype=torch.int64).random_(generator=expected)) for _ in range(2)]
    assert seeds == drawn
    torch.manual_seed(20 + rank)
    for _ in range(2):
        torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(after, torch.get_rng_state())
