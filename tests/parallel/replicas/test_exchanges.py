"""Processes that die inside of collectives, evaluations and saves, under `meshwright launch --survive`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launching import run_accelerate

SCRIPT = Path(__file__).with_name("exchanging.py")
Found = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Run all scenarios, and return what the survivors of one have written."""
    folder = tmp_path_factory.mktemp("exchanging")
    run_accelerate("launch", "--cpu", "--num_processes", 4, "--survive", SCRIPT, folder, directory=folder)

    def of_scenario(name: str) -> list[dict[str, Any]]:
        files = [path for path in folder.glob(f"{name}_*") if path.name[len(name) + 1].isdigit()]
        survivors = [json.loads(path.read_text()) for path in files]
        assert len(survivors) >= 2
        assert any(survivor["victim"] not in survivor["members"] for survivor in survivors)
        return survivors

    return of_scenario


@pytest.mark.parametrize("name", ["gather", "lose_another_in_the_agreement", "lose_another_in_the_connection"])
def test_a_gather_returns_the_values_of_the_survivors(found: Found, name: str) -> None:
    survivors = found(name)
    for survivor in survivors:
        assert survivor["found"] == [float(rank) for rank in survivor["members"]]
    if name.startswith("lose_another"):
        assert min(len(survivor["members"]) for survivor in survivors) == 2


def test_a_member_that_is_behind_takes_the_result_of_another(found: Found) -> None:
    survivors = [survivor["found"] for survivor in found("reduce_late")]
    assert {survivor["attempts"] for survivor in survivors} == {1}, "nobody repeats what took place"
    assert len({survivor["sum"] for survivor in survivors}) == 1
    assert survivors[0]["sum"] == len(survivors) + 1, "the lost member had contributed"
    assert any(survivor["late"] for survivor in survivors)


def test_a_barrier_waits_for_the_survivors(found: Found) -> None:
    for survivor in found("barrier"):
        assert survivor["found"] == len(survivor["members"])


def test_a_broadcast_from_a_lost_member_is_an_error(found: Found) -> None:
    for survivor in found("broadcast"):
        assert f"Rank {survivor['victim']} was lost before the others received" in survivor["found"]


def test_generators_are_synchronized_with_another_rank(found: Found) -> None:
    assert all(survivor["found"] for survivor in found("synchronize"))


def test_a_loss_between_two_gathers_of_a_batch_is_an_error(found: Found) -> None:
    for survivor in found("evaluate_in_two_calls"):
        assert "between two collectives for the same batch" in survivor["found"]
        assert "gather_for_metrics((first, second))" in survivor["found"]


def test_results_that_only_the_lost_member_had_are_an_error(found: Found) -> None:
    for survivor in found("evaluate_alone"):
        assert "not gathered batch by batch" in survivor["found"]


def test_an_evaluation_counts_every_sample_once(found: Found) -> None:
    for survivor in found("evaluate"):
        assert survivor["found"] == [float(number) for number in range(10)]


def test_another_member_makes_the_checkpoint_of_a_lost_coordinator(found: Found) -> None:
    for survivor in found("save"):
        assert "model.safetensors" in survivor["found"]
        assert any(name.startswith("commit") for name in survivor["found"])
