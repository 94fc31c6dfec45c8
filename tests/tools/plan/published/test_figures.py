"""Speeds of published runs from the shapes of their models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.runtime.devices.catalogue import DEVICES
from meshwright.tools.plan.trace import BACKWARD, FORWARD

from .analytic import blocks_of_stages
from .figures import is_timed, rate_of
from .fits import demands_as_much, foundry, hardest, planned
from .harness import OLDER_KERNELS
from .meshes import cells, correlations, needed, spearman
from .outcomes import quantile
from .rows import block_parameters, read_cases
from .script.options import Options
from .shapes import REDUCE, micro_batch

TINY = Options(hidden=64, heads=4, kv_heads=4, ffn=128, vocab=256, batch=2, seq=32)


def test_a_micro_batch_has_the_flops_of_its_matrices() -> None:
    found = micro_batch(TINY, 3, compiled=False)
    tokens = TINY.batch * TINY.seq
    products = [each for each in found.trace.operations if "attention" not in each.name]
    expected = 6 * tokens * (3 * block_parameters(TINY) + TINY.hidden * TINY.vocab)
    assert sum(each.flops for each in products) == expected
    assert [where for _, where, _ in found.boundaries] == [FORWARD] * 4 + [BACKWARD, REDUCE] * 3 + [REDUCE]


def test_split_layers_share_the_flops_and_communicate_in_every_block() -> None:
    whole, half = (micro_batch(replace(TINY, tp=tp), 3, compiled=False).trace for tp in (1, 2))
    assert sum(each.flops for each in half.operations) == sum(each.flops for each in whole.operations) / 2
    gathers = [each for each in half.collectives if each.name == "all_gather"]
    assert len(gathers) == 2 * (2 * 3 + 1)
    assert {each.size for each in gathers} == {TINY.batch * TINY.seq * TINY.hidden * 2}


def test_recomputed_blocks_are_computed_again() -> None:
    plain, again = (micro_batch(replace(TINY, recompute=how), 3, compiled=False).trace for how in ("none", "full"))
    assert not any(each.recomputed for each in plain.operations)
    added = sum(each.flops for each in again.operations if each.recomputed)
    assert added == sum(each.flops for each in again.operations) - sum(each.flops for each in plain.operations) > 0


def test_a_stage_with_a_large_head_has_fewer_blocks() -> None:
    options = replace(TINY, layers=16, pp=2, vocab=6 * block_parameters(TINY) // TINY.hidden)
    assert blocks_of_stages(options, balanced=False) == [8, 8]
    assert blocks_of_stages(options, balanced=True) == [11, 5]


def test_memory_of_a_mesh_falls_with_shards_and_grows_with_the_batch() -> None:
    assert needed(replace(TINY, dp_shard=4)) < needed(TINY) < needed(replace(TINY, batch=4))


def test_ranks_are_correlated_by_their_order() -> None:
    assert spearman([1, 2, 3], [10, 20, 99]) == 1
    assert spearman([1, 2, 3], [9, 5, 1]) == -1


@pytest.mark.parametrize("line", [2, 35])
def test_the_speed_of_a_published_run_is_estimated(line: int) -> None:
    (case,) = (case for case in read_cases() if case.line == line)
    assert case.rate is not None
    assert rate_of(case) == pytest.approx(case.rate, rel=0.15)


def test_every_run_that_is_not_planned_needs_no_more_than_one_that_is() -> None:
    runs = foundry()
    found = hardest(runs)
    stood_for = [case.line for hard, followers in found for case in (hard, *followers)]
    assert sorted(stood_for) == [case.line for case in runs]
    assert len(found) < 50
    assert all(demands_as_much(hard, follower) for hard, followers in found for follower in followers)
    assert not any(demands_as_much(a, b) for a, _ in found for b, _ in found if a is not b)


@pytest.mark.nightly
def test_held_out_speeds_are_near_to_what_was_measured() -> None:
    cases = [case for case in read_cases() if is_timed(case) and case.held_out]
    errors = [
        abs(rate_of(case, OLDER_KERNELS if case.source == "llm-foundry" else DEVICES) / case.rate - 1)
        for case in cases
        if case.rate
    ]
    assert len(errors) > 120
    assert quantile(errors, 0.5) < 0.1
    assert quantile(errors, 0.9) < 0.3


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_most_meshes_of_nanotron_are_among_the_fastest() -> None:
    assert sum(cell.found for cell in cells()) >= 18
    assert min(correlations()) > 0.8


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_runs_that_ran_are_planned_to_fit(tmp_path: Path) -> None:
    assert all(each.fits for each in planned(foundry(), tmp_path))
