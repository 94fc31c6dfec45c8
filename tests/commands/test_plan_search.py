"""`meshwright plan --search`: real searches of a small script, and launches of what they propose."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.launching import Launched, run_accelerate

PROGRAM = Path(__file__).parents[1] / "tools" / "plan" / "program.py"
SMALL = (PROGRAM, "--layers", "2", "--batch_size", "4")


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Launched, dict[str, Any], Path]:
    """Search for two processes on CPUs, with whole sequences."""
    folder = tmp_path_factory.mktemp("search")
    flags = ("--gpus", "2xcpu", "--search", "--search_limit", "2", "--search_files", "best", "--json", "plan.json")
    done = run_accelerate("plan", *flags, "--parallelism_config_cp_size", "1", *SMALL, directory=folder)
    assert done.code == 0, done.complaints
    return done, json.loads((folder / "plan.json").read_text()), folder


def test_a_search_ranks_what_fits_by_time_at_the_same_global_batch(
    searched: tuple[Launched, dict[str, Any], Path],
) -> None:
    done, plan, _ = searched
    candidates = plan["candidates"]
    assert len(candidates) >= 2
    assert "search: 1 of at most 2: " in done.complaints
    seconds = [candidate["rates"]["seconds"] for candidate in candidates if candidate["fits"]]
    assert seconds == sorted(seconds)
    for candidate in candidates:
        copies = candidate["axes"].get("dp_replicate", 1) * candidate["axes"].get("dp_shard", 1)
        assert copies * candidate["micro_batch"] * candidate["accumulation"] == plan["samples"]
    assert "as it is" in [label for candidate in candidates for label in candidate["labels"]]
    assert {axis for candidate in candidates for axis in candidate["axes"]} <= {"dp_replicate", "dp_shard"}


def test_a_candidate_is_what_a_plan_of_its_command_says(searched: tuple[Launched, dict[str, Any], Path]) -> None:
    _, plan, folder = searched
    best = next(each for each in plan["candidates"] if "dp_shard" in each["axes"])
    assert best["changes"] == []
    words = shlex.split(best["command"])
    options = words[2 : words.index(str(PROGRAM))]
    options.remove("--cpu")
    position = options.index("--num_processes")
    del options[position : position + 2]
    done = run_accelerate("plan", "--gpus", "2xcpu", "--json", "-", *options, *SMALL, directory=folder)
    alone = json.loads(done.printed)
    assert alone["axes"] == best["axes"]
    assert alone["fits"][0]["allocated"] == pytest.approx(best["allocated"], rel=0.01)
    assert alone["rates"]["seconds"] == pytest.approx(best["rates"]["seconds"], rel=0.01)


def test_what_a_search_proposes_runs_by_its_line_and_by_its_file(
    searched: tuple[Launched, dict[str, Any], Path],
) -> None:
    _, plan, folder = searched
    best = next(each for each in plan["candidates"] if "dp_shard" in each["axes"])
    words = shlex.split(best["command"])
    assert words[:2] == ["meshwright", "launch"]
    done = run_accelerate(*words[1:], directory=folder)
    assert done.code == 0, done.complaints
    assert done.printed.count("loss") == 2 * 3  # processes, steps
    number = plan["candidates"].index(best) + 1
    explained = run_accelerate("launch", "--explain", "--config_file", f"best/{number}.yaml", *SMALL, directory=folder)
    assert explained.code == 0, explained.complaints
    assert "parallelism_config_dp_shard_size" in explained.printed
    assert "nobody reads" not in explained.complaints


def test_a_search_needs_devices(tmp_path: Path) -> None:
    done = run_accelerate("plan", "--cpu", "--num_processes", "2", "--search", *SMALL, directory=tmp_path)
    assert done.code == 2
    assert "give --gpus" in done.complaints
