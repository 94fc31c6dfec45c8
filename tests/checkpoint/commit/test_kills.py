"""SIGKILL in the middle of a save: a committed checkpoint loads after every one. `sweep.py` does the killing.

CI takes a sample of the calls; MESHWRIGHT_TEST_KILLS=all takes every one, and MESHWRIGHT_TEST_KILLS=50 fifty per sweep.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.ranks.pool import REPOSITORY
from tests.sizes import at_night, sized

from . import sweep
from .sweep import NEW, OLD, Attempt, Call, Sweep

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks, strace and /proc are Linux's"),
    pytest.mark.timeout(sized(gate=1200, nightly=36_000)),
]


@pytest.fixture(scope="module")
def strace() -> None:
    """Skip where strace is not installed, or may not follow a process that is not its child."""
    if shutil.which("strace") is None:
        pytest.skip("apt-get install strace")
    child = subprocess.Popen(["sleep", "9"])
    tried = subprocess.run(["timeout", "0.5", "strace", "-qq", "-p", str(child.pid)], capture_output=True, text=True)
    child.kill()
    child.wait()
    if "attach" in tried.stderr:
        pytest.skip(f"strace may not attach here: {tried.stderr}")


needs_strace = pytest.mark.usefixtures("strace")


class Bench:
    """A process that does one sweep after the other: it has imported torch, and forks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.complaints = (folder / "complaints").open("w+", encoding="utf-8")
        self.process = warm.Popen(
            [sys.executable, "-m", sweep.__name__, str(folder)],
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.complaints,
            text=True,
        )

    def attempts(self, plan: Sweep) -> tuple[Attempt, list[Attempt]]:
        """Return a save that was not killed, and those that were."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(asdict(plan)), file=self.process.stdin, flush=True)
        found: list[Attempt] = []
        while (line := self.process.stdout.readline()) != "\n":
            if not line:
                pytest.fail(f"the bench ended: {self.output()}")
            found.append(Attempt(**json.loads(line)))
        return found[0], found[1:]

    def output(self) -> str:
        self.complaints.seek(0)
        return self.complaints.read()[-4000:]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("bench"))
    yield made
    made.process.kill()
    made.process.wait()


def assert_survives(bench: Bench, folder: Path, *, sample: int, at_least: float = 0.6, **options: Any) -> list[Attempt]:
    whole, attempts = bench.attempts(Sweep(folder=str(folder), points=sized(gate=sample, nightly=None), **options))
    assert (whole.killed, whole.loaded, whole.problem) == (False, NEW, None)
    problems = [f"{attempt.call}: {attempt.problem}" for attempt in attempts if attempt.problem is not None]
    assert problems == []
    assert {attempt.loaded for attempt in attempts} <= {OLD, NEW}
    if options.get("victim", 0) == 0:  # the one that commits
        assert {attempt.loaded for attempt in attempts} == {OLD, NEW}, "the sweep covers both sides of the commit"
    assert sum(attempt.killed for attempt in attempts) >= at_least * len(attempts)
    for attempt in attempts:
        assert len(attempt.left_after_next_save) == 1, f"{attempt.call}: the next save left {attempt}"
    print(f"{options}: {len(attempts)} calls, {sum(attempt.killed for attempt in attempts)} kills")
    return attempts


@needs_strace
@pytest.mark.parametrize("explicit", [False, True], ids=["automatic", "overwriting"])
def test_one_process_may_die_at_any_system_call(explicit: bool, bench: Bench, tmp_path: Path) -> None:
    assert_survives(bench, tmp_path, sample=16, explicit=explicit)


@needs_strace
@pytest.mark.parametrize(("explicit", "victim"), [at_night(False, 0), (True, 0), at_night(False, 1), (True, 1)])
def test_either_of_two_processes_may_die_at_any_system_call(
    victim: int, explicit: bool, bench: Bench, tmp_path: Path
) -> None:
    attempts = assert_survives(bench, tmp_path, sample=6, world_size=2, victim=victim, explicit=explicit)
    messages = {message for attempt in attempts for message in attempt.survivors if message}
    if victim == 0:
        assert messages, "the other rank noticed"
        assert all("LostProcessError: Another process ended" in message for message in messages), messages
    else:
        assert not messages, "rank 0 waits for nobody"
        assert {attempt.loaded for attempt in attempts} == {NEW}


@needs_strace
def test_a_save_in_the_background_may_die_at_any_system_call(bench: Bench, tmp_path: Path) -> None:
    assert_survives(bench, tmp_path, sample=6, wait=False)


@pytest.mark.parametrize("explicit", [False, at_night(True)], ids=["automatic", "overwriting"])
def test_one_process_may_die_before_any_call_of_python(explicit: bool, bench: Bench, tmp_path: Path) -> None:
    assert_survives(bench, tmp_path, sample=10, by="python", explicit=explicit)


@pytest.mark.parametrize("explicit", [at_night(False), True], ids=["automatic", "overwriting"])
def test_whoever_finds_the_remains_may_die_too(explicit: bool, bench: Bench, tmp_path: Path) -> None:
    """Begin with every kind of remains that a kill leaves, and kill the process that loads and saves there."""
    kinds = tmp_path / "kinds"
    assert_survives(bench, tmp_path / "first", sample=16, by="python", explicit=explicit, keep_remains=str(kinds))
    found = sorted(kinds.iterdir())
    assert len(found) >= 4, "the first sweep left several kinds of remains"
    chosen = sized(gate=[path for path in found if path.name.count(",")][:1], nightly=found)
    for number, kind in enumerate(chosen):
        options: dict[str, Any] = {"by": "python", "explicit": explicit, "resumes": True, "begin_with": str(kind)}
        folder = str(tmp_path / f"then-{number}")
        whole, attempts = bench.attempts(Sweep(folder=folder, points=sized(gate=6, nightly=None), **options))
        for attempt in (whole, *attempts):
            assert attempt.problem is None, f"{kind.name}, {attempt.call}: {attempt.problem}"
            assert attempt.loaded in (OLD, NEW)
            assert len(attempt.left_after_next_save) == 1


def test_a_sample_takes_calls_that_change_names_and_others() -> None:
    calls = [Call("rename" if number % 10 == 0 else "write", number) for number in range(100)]
    chosen = sweep.choose(calls, 10)
    assert 10 <= len(chosen) <= 20
    assert {call.name for call in chosen} == {"rename", "write"}
    assert sweep.choose(calls, None) == calls
