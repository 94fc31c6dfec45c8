"""A run in a control group ends as the plan says: it fits, or the kernel ends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
GROUPS = [Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")]  # version 1, and version 2
LIMITS = ("memory.limit_in_bytes", "memory.max")
WORDS = ("--layers", "6", "--batch_size", "64")
IMPORT = """
import accelerate, torch.distributed.fsdp, torch.distributed.pipelining
print(open("/proc/self/status").read().split("RssAnon:")[1].split()[0])
"""
"""Pages of files are not counted: the kernel can read them again."""


@pytest.fixture
def limited() -> Iterator[Callable[[int], Callable[[], None]]]:
    """Return a function that makes a process join a control group with so many bytes."""
    made: list[Path] = []

    def group_of(size: int) -> Callable[[], None]:
        for parent in GROUPS:
            folder = parent / f"accelerate_plan_{os.getpid()}_{len(made)}"
            try:
                folder.mkdir()
            except OSError:
                continue
            made.append(folder)
            for name in LIMITS:
                if (folder / name).exists():
                    (folder / name).write_text(str(size))
                    return lambda: (folder / "cgroup.procs").write_text(str(os.getpid())) and None
        pytest.skip("this machine lets nobody make control groups of memory")

    yield group_of
    for folder in made:
        folder.rmdir()


@pytest.mark.nightly  # five programs start cold
def test_a_run_fits_as_the_plan_says(tmp_path: Path, limited: Callable[[int], Callable[[], None]]) -> None:
    program = [sys.executable, str(HERE / "program.py"), *WORDS]
    plan = [sys.executable, "-m", "meshwright", "plan", "--cpu", "--json", "-", *program[1:]]
    planned = json.loads(subprocess.run(plan, capture_output=True, text=True, check=True).stdout)
    peak = planned["ranks"][0]["memory"]["total"]
    before = 1024 * int(
        subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout
    )
    for share, fits in ((1.5, True), (0.75, False)):
        join = limited(int(before + share * peak))
        done = subprocess.run(program, preexec_fn=join, capture_output=True, text=True, timeout=300)
        assert (done.returncode == 0) == fits, (share, done.returncode, done.stderr[-500:])
