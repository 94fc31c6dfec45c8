"""`meshwright launch --survive` on accelerators whose collectives obey the rules of NCCL."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.simulated_accelerator.build import compiled, why_not
from tests.sizes import sized

from .test_surviving import REPLICAS, Run, assert_equal_to_one_process, assert_every_sample_once

RULES = {"SIMULATED_ACCELERATOR_RULES": "nccl", "SIMULATED_ACCELERATOR_DEVICES": str(REPLICAS)}


@pytest.fixture(autouse=True)
def built() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    compiled()


def test_random_losses_are_survived_on_simulated_accelerators(tmp_path: Path) -> None:
    kills, steps = sized(gate=(2, 40), nightly=(100, 3000))
    folder = tmp_path / "run"
    folder.mkdir()
    run = Run(folder, steps, "zero_first", **RULES)
    made = run.kill_at_random(kills, random.Random(0))
    complaints = run.end()
    assert made == kills, complaints
    assert_equal_to_one_process(run, tmp_path / "one", steps, "zero_first")
    assert_every_sample_once(run, made)
    print(complaints)


def test_collectives_of_evaluations_survive_losses_on_simulated_accelerators(tmp_path: Path) -> None:
    kills, steps = sized(gate=(1, 20), nightly=(30, 450))
    folder = tmp_path / "run"
    folder.mkdir()
    run = Run(folder, steps, "examine", **RULES)
    made = run.kill_at_random(kills, random.Random(1))
    complaints = run.end()
    assert made == kills, complaints
    assert_equal_to_one_process(run, tmp_path / "one", steps, "examine")
    assert_every_sample_once(run, made)
