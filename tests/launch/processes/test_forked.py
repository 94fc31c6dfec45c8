"""Ranks that are forked: their output, their failures, and their end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launching import environment, run_to_success

HARNESS = """
import json, sys
from pathlib import Path
from meshwright.launch.processes.forked import World, run_forked
world = World(script=("ranks.py", *sys.argv[2:]), as_module=False, processes=int(sys.argv[1]),
              port=1, variables={"WORD": "given"}, folder=Path("logs"), before=lambda: print("before"))
failure = run_forked(world, 6.0)
print(json.dumps(None if failure is None else [failure.rank, failure.reason, failure.log]))
"""
SCRIPT = """
import atexit, os, shutil, sys, time
atexit.register(print, "at the end")
rank = os.environ.get("RANK", "alone")
print("rank", rank, os.environ["WORD"], flush=True)
if "removes" in sys.argv:
    shutil.rmtree("logs", ignore_errors=True)
if rank == "1" and "fails" in sys.argv:
    raise ValueError("no")
if "waits" in sys.argv:
    time.sleep(60)
if "exits" in sys.argv:
    sys.exit("enough")
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((2,), None),
        ((1,), None),
        ((2, "fails"), [1, "ended with exit code 1", "ValueError: no"]),
        ((2, "fails", "removes"), [1, "ended with exit code 1", ""]),
        ((2, "waits", "removes"), [0, "had not ended after 6 s", ""]),
        ((2, "waits"), [0, "had not ended after 6 s", "rank 0 given"]),
        ((1, "exits"), [0, "ended with exit code 1", "enough"]),
    ],
)
def test_a_world_ends_as_its_ranks_do(words: tuple[Any, ...], expected: list[Any] | None, tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(SCRIPT)
    (tmp_path / "harness.py").write_text(HARNESS)
    command = [sys.executable, "harness.py", *map(str, words)]
    printed = run_to_success(command, "harness.py", directory=tmp_path, env=environment(tmp_path), time_limit=120)
    found = json.loads(printed.splitlines()[-1])
    if expected is None:
        assert found is None
        log = (tmp_path / "logs" / "rank_0.log").read_text()
        assert log.splitlines()[0] == "before"
        assert "at the end" in log
    else:
        assert found[:2] == expected[:2]
        assert expected[2] in found[2]


FOLDER = """
from meshwright.launch.processes.forked import World, run_forked
from meshwright.temporary import temporary_folder
with temporary_folder("test") as folder:
    world = World(script=("ranks.py", "fails"), as_module=False, processes=2, port=1, variables={"WORD": "given"},
                  folder=folder / "run", before=lambda: None)
    failure = run_forked(world, 30.0)
    print(failure.rank, "ValueError: no" in failure.log, folder.exists())
print(folder.exists())
"""


def test_a_rank_that_ends_well_leaves_the_folder_in_which_the_others_write(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(SCRIPT.replace("raise", "time.sleep(1)\n    raise"))
    (tmp_path / "harness.py").write_text(FOLDER)
    printed = run_to_success(
        [sys.executable, "harness.py"], "harness.py", directory=tmp_path, env=environment(tmp_path), time_limit=120
    )
    assert printed.splitlines() == ["1 True True", "False"]
