"""`accelerate plan` of our examples, as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import run_accelerate
from tests.sizes import cases

EXAMPLES = Path(__file__).parents[3] / "examples"
REFUSED = {"distributed_inference", "experts"}
"""One only infers, and the tokens of the other depend on numbers: see `test_refusals`."""


@pytest.mark.parametrize(
    "example",
    cases(
        gate=["gan", "language_model_fsdp"],
        nightly=sorted(file.stem for file in EXAMPLES.glob("*.py") if file.stem not in REFUSED),
    ),
)
def test_an_example_is_planned_and_leaves_no_files(example: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    words = ("--gpus", "2xA100-80GB", "--json", tmp_path / "plan.json", EXAMPLES / f"{example}.py")
    done = run_accelerate("plan", *words, directory=tmp_path / "here", HF_HOME=str(tmp_path / "home"), time_limit=900.0)
    assert done.code == 0, done.complaints
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["world_size"] == 2
    assert plan["parameters"] >= plan["trained_parameters"] > 0
    assert plan["samples"] > 0
    assert plan["rates"]["seconds"] > 0
    assert {guess.rpartition(":")[0] for guess in plan["guesses"]} <= {str(EXAMPLES / f"{example}.py")}
    assert not list((tmp_path / "here").iterdir())
