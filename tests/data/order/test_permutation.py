"""Random access into a permutation of any size."""

from __future__ import annotations

import math
import time
import tracemalloc
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
import torch

from meshwright import Accelerator, DataLoaderConfiguration, HugeRandomSampler
from meshwright.data.order.permutation import Permutation
from tests.sizes import at_night


@pytest.mark.parametrize("n", [0, 1, 2, 3, 5, 8, 9, 100, 1000, 4097, 65537])
def test_it_is_a_permutation(n: int) -> None:
    for seed in range(3):
        assert sorted(Permutation(n, seed)) == list(range(n))


def test_positions_slices_and_iteration_agree() -> None:
    order = Permutation(5000, seed=1, epoch=2)
    everything = list(order)
    assert [order[i] for i in range(0, 5000, 97)] == everything[::97]
    assert order[100:130] == everything[100:130]
    assert order[-1] == everything[-1]
    assert len(order) == 5000
    with pytest.raises(IndexError, match="outside a permutation of 5000"):
        order[5000]


def test_seed_and_epoch_choose_the_order() -> None:
    assert list(Permutation(100, 1, 0)) == list(Permutation(100, 1, 0))
    assert list(Permutation(100, 1, 0)) != list(Permutation(100, 1, 1))
    assert list(Permutation(100, 1, 0)) != list(Permutation(100, 2, 0))


def test_a_million_million_samples_need_no_time_and_no_memory() -> None:
    Permutation(10, 0)[0]  # NumPy's own start
    best = math.inf
    for seed in range(5):
        started = time.perf_counter()
        first = Permutation(10**12, seed)[0]
        best = min(best, time.perf_counter() - started)
        assert 0 <= first < 10**12
    assert best < 1e-3
    tracemalloc.start()
    order = Permutation(10**12, 7)
    sample = [order[i * 10**9] for i in range(100)] + order[10**11 : 10**11 + 1000]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000
    assert len(set(sample)) == len(sample)


@pytest.mark.parametrize("n", [3, 4, at_night(5)])
def test_all_small_permutations_are_equally_likely(n: int) -> None:
    trials = 60 * math.factorial(n)
    seen = Counter(tuple(Permutation(n, seed)) for seed in range(trials))
    expected = trials / math.factorial(n)
    chi_squared = sum((seen[p] - expected) ** 2 / expected for p in permutations(range(n)))
    degrees = math.factorial(n) - 1
    assert chi_squared < degrees + 5 * math.sqrt(2 * degrees)


def test_every_sample_is_equally_likely_at_every_position_and_neighbours_are_independent() -> None:
    n, seeds, bins = 1000, 200, 20
    table = np.zeros((bins, bins))
    steps = np.zeros(n)
    for seed in range(seeds):
        order = np.array(Permutation(n, seed))
        np.add.at(table, (np.arange(n) * bins // n, order * bins // n), 1)
        np.add.at(steps, np.diff(order) % n, 1)
    for counts, degrees in ((table, (bins - 1) ** 2), (steps[1:], n - 2)):
        chi_squared = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
        assert chi_squared < degrees + 5 * math.sqrt(2 * degrees)


def test_the_sampler_takes_the_seed_of_torchs_generator_where_none_is_given() -> None:
    torch.manual_seed(7)
    of_generator = HugeRandomSampler(range(50))
    assert list(of_generator) == list(HugeRandomSampler(range(50), seed=7))
    assert list(of_generator) != list(HugeRandomSampler(range(50), seed=0)), "0 is a seed like others"
    torch.manual_seed(8)
    assert list(HugeRandomSampler(range(50))) != list(of_generator)


def test_the_sampler_follows_the_epoch_and_the_option_uses_it() -> None:
    sampler = HugeRandomSampler(range(50), seed=4)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert len(sampler) == 50
    from torch.utils.data import DataLoader

    config = DataLoaderConfiguration(constant_memory_shuffle=True, data_seed=4)
    loader = Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(range(50), batch_size=8, shuffle=True))
    assert isinstance(loader.get_sampler(), HugeRandomSampler)
    assert [i for batch in loader for i in batch.tolist()] == first
    assert sorted(i for batch in loader for i in batch.tolist()) == list(range(50))
