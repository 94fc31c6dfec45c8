"""Every command of a page runs in a folder that has the files it names; where it cannot, its launch is explained."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.launching import run_to_success
from tests.sizes import sized

from .pages import PAGES, Block, blocks_of, name_of, pages_with
from .workshop import furnish

BLOCKS = [block for page in PAGES for block in blocks_of(page, "bash")]
NOT_RUN = [block for page in PAGES for block in blocks_of(page) if block.why_not is not None]
LAUNCHES = [
    (block.place, found[1].replace("\\\n", " "))
    for block in BLOCKS
    if block.why_not is not None
    for found in re.finditer(r"meshwright launch ((?:[^\n|;#\\]|\\\n)+)", block.code)
]

PROGRAMS = ("meshwright", "python", "torchrun")
EXAMPLE = re.compile(r" examples/\w+\.py$")
"""`tests/examples` starts each of them."""


def _environment(folder: Path) -> dict[str, str]:
    """Return what a reader's shell has, with a home, a browser and one thread per process of its own."""
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HF_HOME": str(folder / "home"),
        "BROWSER": "true",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


@pytest.mark.parametrize("page", pages_with("bash"), ids=name_of)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    furnish(tmp_path)
    ran_before = {launch for earlier in PAGES[: PAGES.index(page)] for launch in _launches_of(earlier)}
    ran_before |= sized(gate={launch for launch in _launches_of(page) if EXAMPLE.search(launch)}, nightly=set())
    for block in _runnable(page):
        _run(block, tmp_path, without=ran_before)


def _launches_of(page: Path) -> set[str]:
    return {launch for block in _runnable(page) for launch in _launches(block)}


def _runnable(page: Path) -> list[Block]:
    return [block for block in blocks_of(page, "bash") if block.why_not is None]


def _launches(block: Block) -> set[str]:
    """Return the starts of a script in a block: they need nothing from the lines before, and take long."""
    lines = (line.partition(" #")[0].strip() for line in block.code.splitlines())
    return {line for line in lines if line.startswith(("meshwright launch ", "python ")) and line.endswith(".py")}


def _run(block: Block, folder: Path, without: set[str]) -> None:
    lines = [line for line in block.code.splitlines() if line.partition(" #")[0].strip() not in without]
    for command in _commands("\n".join(lines)):
        run_to_success(command, block.place, directory=folder, env=_environment(folder), time_limit=500)


def _commands(code: str) -> list[list[str]]:
    """Return the commands of a block: the lines themselves, which start warm, or a shell if one of them needs it."""
    commands = [shlex.split(line, comments=True) for line in code.replace("\\\n", " ").splitlines()]
    commands = [command for command in commands if command]
    needs_a_shell = re.search(r"[|&;<>$`*?{}]", code) or not all(command[0] in PROGRAMS for command in commands)
    return [["bash", "-euo", "pipefail", "-c", code]] if needs_a_shell else commands


@pytest.mark.parametrize(("place", "words"), LAUNCHES, ids=[f"{place} {words[:40]}" for place, words in LAUNCHES])
def test_a_launch_that_cannot_run_here_can_be_explained(place: str, words: str, tmp_path: Path) -> None:
    furnish(tmp_path)
    command = ["meshwright", "launch", "--explain", *shlex.split(words)]
    printed = run_to_success(command, place, directory=tmp_path, env=_environment(tmp_path), time_limit=300)
    assert "train.py" in printed


def test_few_blocks_are_not_run() -> None:
    listed = [f"{block.place}: {block.why_not}" for block in NOT_RUN]
    print(*listed, sep="\n")
    assert len(listed) <= 20, "\n".join(listed)
    assert sum(block.why_not is None for block in BLOCKS) >= 8
