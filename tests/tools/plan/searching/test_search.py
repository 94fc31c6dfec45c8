"""What a search traces, what it leaves out, and how it ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright.runtime.devices.catalogue import cluster
from meshwright.tools.plan.memory.fit import Fit
from meshwright.tools.plan.memory.peak import memory_of
from meshwright.tools.plan.result import Plan
from meshwright.tools.plan.searching.choices import Choice, choice_of
from meshwright.tools.plan.searching.estimates import Estimates
from meshwright.tools.plan.searching.search import PlanSearch, describe
from meshwright.tools.plan.timing.rates import Rates
from meshwright.tools.plan.timing.step import time_step
from tests.tools.plan.made import MIB, model

UNIT = 10 * MIB
CLUSTER = cluster("4xH100")
TRACE = model(8, sharded=True, parameters=8 * 2 * MIB, trained_parameters=8 * 2 * MIB)
BASE = choice_of(TRACE)
KEPT, RECOMPUTED = replace(BASE, reshard=False), replace(BASE, recompute=True)


def estimates() -> Estimates:
    return Estimates(BASE, TRACE, memory_of(TRACE), time_step(TRACE, CLUSTER), CLUSTER)


def planned(memory: float, seconds: float, capacity: float = 100.0, expandable: float | None = None) -> Plan:
    plan = Plan("train.py", "4xH100", 4, {}, 0, 0, [])
    held = memory if expandable is None else expandable
    plan.fits = [Fit("H100", capacity * UNIT, 0, min(memory, held) * UNIT, memory * UNIT, held * UNIT)]
    plan.rates = Rates(seconds, seconds, seconds, 1 / seconds, 1 / seconds, 1 / seconds, 0.4)
    return plan


def search(outcome: Callable[[Choice], Plan], limit: int = 24) -> tuple[PlanSearch, list[Choice]]:
    asked: list[Choice] = []

    def evaluate(choice: Choice) -> Plan:
        asked.append(choice)
        return outcome(choice)

    return PlanSearch(estimates(), evaluate, lambda words: None, limit), asked


def test_what_fits_is_ranked_by_time_and_the_rest_by_memory() -> None:
    sixth, half = replace(BASE, dp_replicate=2, dp_shard=2, batch=6), replace(BASE, batch=4)
    outcomes = {sixth: planned(120, 1.0), RECOMPUTED: planned(60, 4.0), half: planned(70, 3.0)}
    searching, _ = search(lambda choice: outcomes[choice])
    found = searching.run(list(outcomes), planned(150, 2.0))
    assert [each.choice for each in found] == [half, RECOMPUTED, sixth, BASE]
    assert [each.candidate().fits for each in found] == [True, True, False, False]


def test_settings_that_save_memory_are_pointless_where_it_fits_without_them() -> None:
    searching, asked = search(lambda choice: planned(50, 1.0))
    both = replace(KEPT, recompute=True)
    searching.run([RECOMPUTED, both, KEPT], planned(50, 1.0))
    assert asked == [KEPT]  # which fits too, so that nothing has to be computed again


def test_what_needs_more_memory_than_what_did_not_fit_is_not_traced() -> None:
    larger = replace(BASE, batch=16)
    fewer_shards = replace(BASE, dp_replicate=2, dp_shard=2)
    searching, asked = search(lambda choice: planned(50, 1.0))
    searching.run([larger, fewer_shards, KEPT, RECOMPUTED], planned(150, 1.0))
    assert asked == [RECOMPUTED]


def test_state_that_cannot_fit_is_not_traced() -> None:
    whole = Choice(dp_replicate=4, batch=8)
    assert estimates().least_memory(whole) > 4 * 8 * 24 * MIB > 40 * UNIT > estimates().least_memory(BASE)
    searching, asked = search(lambda choice: planned(35, 1.0, capacity=40))
    searching.run([whole, replace(BASE, batch=4)], planned(35, 1.0, capacity=40))
    assert asked == [replace(BASE, batch=4)]


def test_a_mesh_that_the_script_refuses_is_tried_once_and_the_search_goes_on() -> None:
    split = Choice(dp_shard=2, tp=2, batch=8)

    def outcome(choice: Choice) -> Plan:
        if choice.tp > 1:
            raise ValueError("heads do not divide")
        return planned(50, 1.0)

    searching, asked = search(outcome)
    found = searching.run([split, replace(split, reshard=False), RECOMPUTED], planned(150, 1.0))
    assert len([choice for choice in asked if choice.tp > 1]) == 1
    assert list(searching.refused.values()) == ["heads do not divide"]
    assert found[0].choice == RECOMPUTED


def test_at_most_the_limit_is_traced() -> None:
    searching, asked = search(lambda choice: planned(50, 1.0), limit=2)
    searching.run([replace(BASE, batch=batch) for batch in (1, 2, 4)], planned(50, 1.0))
    assert len(asked) == 2


def test_control_c_ends_the_search_with_what_was_found() -> None:
    def outcome(choice: Choice) -> Plan:
        if len(asked) == 2:
            raise KeyboardInterrupt
        return planned(50, 0.5)

    searching, asked = search(outcome)
    found = searching.run([replace(BASE, batch=batch) for batch in (1, 2, 4)], planned(50, 1.0))
    assert len(found) == 2
    assert found[0].choice == asked[0]


def test_what_is_expected_to_be_much_slower_than_three_that_fit_is_left_out() -> None:
    small = [replace(BASE, batch=1, accumulation=8 * factor) for factor in (1, 64)]
    expected = estimates().seconds
    assert expected(small[1]) > 3 * expected(small[0])
    searching, asked = search(lambda choice: planned(50, expected(choice)))
    searching.run([KEPT, replace(KEPT, batch=4), *small], planned(50, expected(BASE)))
    assert small[1] not in asked


def test_expandable_segments_are_named_where_only_they_fit() -> None:
    searching, _ = search(lambda choice: planned(120, 1.0, expandable=90))
    found = searching.run([RECOMPUTED], planned(150, 1.0))
    assert found[0].candidate().fits
    assert "expandable_segments" in found[0].candidate().labels


@pytest.mark.parametrize(
    ("more", "less"),
    [
        (replace(BASE, batch=16), BASE),
        (KEPT, BASE),
        (BASE, RECOMPUTED),
        (replace(BASE, dp_replicate=2, dp_shard=2), BASE),
    ],
)
def test_expected_memory_grows_with_what_needs_more(more: Choice, less: Choice) -> None:
    assert estimates().expected_memory(more) > estimates().expected_memory(less)


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        (RECOMPUTED, BASE),
        (replace(BASE, accumulation=4, batch=2), BASE),
    ],
)
def test_expected_time_grows_with_what_takes_longer(slower: Choice, faster: Choice) -> None:
    assert estimates().seconds(slower) > estimates().seconds(faster)


def test_shards_are_not_expected_to_need_the_buckets_of_replicas() -> None:
    trace = model(8)
    base = choice_of(trace)
    replicated = Estimates(base, trace, memory_of(trace), time_step(trace, CLUSTER), CLUSTER)
    buckets = memory_of(trace).most["communication"]
    assert buckets > 0
    less = replicated.expected_memory(base) - replicated.expected_memory(BASE)
    state = sum(memory_of(trace).most[owner] for owner in ("weights", "gradients", "optimizer"))
    assert less >= buckets + state * 3 / 4


def test_what_differs_in_replicas_only_waits_for_what_is_new() -> None:
    variant, new = replace(KEPT, dp_replicate=2, dp_shard=2), replace(KEPT, batch=4, accumulation=2)
    searching, asked = search(lambda choice: planned(50, 1.0), limit=2)
    searching.run([variant, new, KEPT], planned(50, 1.0))
    assert set(asked) != {variant, KEPT}


def test_a_choice_is_described_in_a_few_words() -> None:
    choice = Choice(dp_shard=2, tp=2, batch=4, accumulation=2, recompute=True, reshard=False)
    assert describe(choice) == "dp_shard 2 x tp 2, batch 4 x 2, kept after forward, recompute"


def test_where_nothing_can_fit_the_least_of_the_shards_is_traced_for_offloading() -> None:
    searching, asked = search(lambda choice: planned(40, 1.0, capacity=0.001))
    searching.run([BASE, KEPT, RECOMPUTED], planned(50, 1.0, capacity=0.001))
    assert len(asked) == 1
    assert asked[0].shards > 1
