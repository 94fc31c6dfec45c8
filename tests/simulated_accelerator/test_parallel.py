"""Every way to distribute a model on simulated accelerators, with random delays: it trains as on CPUs."""

from __future__ import annotations

import functools

import pytest

from tests.parallel.ways import WAYS
from tests.ranks import RankFailure
from tests.simulated_accelerator import run_on_a_simulated_accelerator
from tests.sizes import at_night, sized

from .training import Results, assert_same, train

REPEATS = sized(gate=2, nightly=100)
TOLERANCES = {"rtol": 1e-4, "atol": 1e-4}


@functools.cache
def on_cpus(way: str) -> tuple[Results, ...]:
    return tuple(run_on_a_simulated_accelerator(train, world_size=WAYS[way][0], way=way, cpu=True))


@pytest.mark.parametrize(
    "way",
    [
        *("one", "ddp2", "fsdp2", "tp2", "cp2", "pp2", "fsdp2xtp2"),
        at_night("hsdp2x2"),
        at_night("fsdp4"),
        at_night("copies2xtp2"),
        at_night("fsdp2xcp2"),
        at_night("pp2xfsdp2"),
    ],
)
def test_training_gives_what_cpus_give_on_simulated_accelerators(way: str) -> None:
    for repeat in range(REPEATS):
        found = run_on_a_simulated_accelerator(train, world_size=WAYS[way][0], way=way, jitter_seed=repeat)
        for of_rank, expected in zip(found, on_cpus(way), strict=True):
            assert_same(of_rank, expected, **TOLERANCES)


@pytest.mark.parametrize("way", ["ddp2", "fsdp2", "tp2"])
def test_a_synchronization_that_is_missing_shows_on_simulated_accelerators(way: str) -> None:
    expected = on_cpus(way)
    try:
        found = run_on_a_simulated_accelerator(train, world_size=WAYS[way][0], way=way, remove_synchronization=True)
    except RankFailure:  # poison where torch expects a size is an error at once
        return
    assert not all(is_same(*pair) for pair in zip(found, expected, strict=True))


def is_same(found: Results, expected: Results) -> bool:
    try:
        assert_same(found, expected, **TOLERANCES)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize(
    "way",
    [
        "ddp2",
        "tp2",
        "fsdp2",
        "fsdp2xtp2",
    ],
)
def test_training_on_simulated_accelerators_that_plug_in_from_outside(way: str) -> None:
    found = run_on_a_simulated_accelerator(train, world_size=WAYS[way][0], way=way, plugged_in=True)
    for of_rank, expected in zip(found, on_cpus(way), strict=True):
        assert_same(of_rank, expected, **TOLERANCES)
