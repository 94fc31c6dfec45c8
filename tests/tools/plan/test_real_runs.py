"""What a plan says of memory is what a real run on gloo ranks allocates."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.sizes import at_night

HERE = Path(__file__).parent
PROGRAM = HERE / "program.py"
ACCELERATE = (sys.executable, "-m", "meshwright")


def run(*words: object) -> str:
    done = warm.run([*ACCELERATE, *map(str, words)], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        at_night(1, ""),
        at_night(1, "--levers recompute"),
        at_night(1, "--levers linear_loss"),
        at_night(1, "--levers in_backward"),
        (1, "--levers recompute linear_loss in_backward"),
        at_night(2, "--accumulation 2"),
        (2, "--dp_shard 2 --recompute"),
        at_night(2, "--dp_shard 2 --accumulation 2"),
        at_night(2, "--tp 2"),
        (2, "--cp 2"),
        at_night(2, "--pp 2"),
        at_night(2, "--pp 2 --schedule gpipe"),
        at_night(4, "--dp_shard 2 --tp 2"),
        at_night(4, "--dp_shard 4 --accumulation 2"),
        at_night(4, "--pp 2 --dp_shard 2"),
    ],
)
def test_the_peak_is_within_two_per_cent_of_what_a_real_run_allocates(
    processes: int, words: str, tmp_path: Path
) -> None:
    run("launch", "--cpu", "--num_processes", processes, HERE / "counted.py", tmp_path, PROGRAM, *words.split())
    run("plan", "--cpu", "--num_processes", processes, "--json", tmp_path / "plan.json", PROGRAM, *words.split())
    planned = json.loads((tmp_path / "plan.json").read_text())["ranks"]
    assert {rank["rank"] for rank in planned} >= {0, processes - 1} or processes == 4
    for rank in planned:
        real = int((tmp_path / str(rank["rank"])).read_text())
        assert rank["memory"]["total"] == pytest.approx(real, rel=0.02), rank["rank"]


@pytest.mark.nightly  # test_depths.py compares the plans
def test_few_blocks_stand_for_all_of_them(tmp_path: Path) -> None:
    words = ("--layers", 9, "--dp_shard", 2)
    run("launch", "--cpu", "--num_processes", 2, HERE / "counted.py", tmp_path, PROGRAM, *words)
    run("plan", "--cpu", "--num_processes", 2, "--json", tmp_path / "plan.json", PROGRAM, *words)
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["blocks"], plan["all_blocks"]) == (5, 9)
    real = int((tmp_path / "0").read_text())
    assert plan["ranks"][0]["memory"]["total"] == pytest.approx(real, rel=0.02)


def test_experts_that_are_spread_are_refused_by_name() -> None:
    words = ("plan", "--gpus", "2xA100-80GB", HERE.parents[2] / "examples" / "experts.py")
    done = warm.run([*ACCELERATE, *map(str, words)], capture_output=True, text=True, timeout=400)
    assert done.returncode == 2
    assert "ep_size=2 cannot be used" in done.stderr
    assert "experts.py:" in done.stderr
