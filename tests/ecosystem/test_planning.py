"""`accelerate plan` of training scripts as libraries ship them, unmodified, on tiny models without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.sizes import at_night

from .libraries import PYTHON, needs_libraries, program, run_command
from .materials import make_materials
from .planned_scripts import SCRIPTS

pytestmark = [needs_libraries]

TINY = 64 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32) + 32
"""Parameters of the tiny model without its head: embeddings, two blocks, the last norm."""
HEADS = {"reward": 32}
"""Parameters of the head; of the others, one score per word."""


def planned(name: str, folder: Path) -> tuple[dict[str, Any], Path]:
    """Plan one of TRL's scripts on two devices; return the plan, and where the script is."""
    make_materials(folder, tiny=True)
    script = next(Path(PYTHON).parents[1].glob(f"lib/python*/site-packages/{SCRIPTS[name].name}"))
    words = ["plan", *SCRIPTS[name].devices, "--json", "plan.json", str(script), *SCRIPTS[name].arguments.split()]
    run_command(program("accelerate"), *words, directory=folder, TRL_EXPERIMENTAL_SILENCE="1")
    return json.loads((folder / "plan.json").read_text()), script


@pytest.mark.parametrize("name", [at_night("sft"), "dpo", at_night("kto"), at_night("reward"), at_night("grpo")])
def test_scripts_that_a_package_ships_are_planned_as_they_are(name: str, tmp_path: Path) -> None:
    plan, script = planned(name, tmp_path)
    assert plan["trained_parameters"] == TINY + HEADS.get(name, 64 * 32)
    assert plan["world_size"] == 2
    assert plan["samples"] >= 2 * 2
    assert {guess.partition(":")[0] for guess in plan["guesses"]} <= {str(script)}, "its own lines are named"
    at_peak = plan["ranks"][0]["memory"]["peak"]["bytes"]
    models = 2 if name == "dpo" else 1  # and the reference
    assert at_peak["weights"] >= 4 * models * plan["trained_parameters"]
    assert at_peak["optimizer"] >= 8 * plan["trained_parameters"]
