"""Real faults on four real processes: who is named, which lines, and how soon."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from tests import warm
from tests.timing import ALONE

FAULTS = Path(__file__).with_name("faults.py")
THRESHOLD = 3.0
SECONDS_TO_REPORT = THRESHOLD + 5


@dataclass(frozen=True)
class Ended:
    """How one rank of a world ended."""

    printed: str

    @property
    def code(self) -> int:
        return int(self.printed.rpartition("exit code ")[2])

    @property
    def reported_after(self) -> float:
        return float(re.findall(r"^reported after ([\d.]+) s", self.printed, re.MULTILINE)[0])


def run(folder: Path, *names: str, on_devices: bool = False) -> None:
    environment = {
        "MESHWRIGHT_HANG_SECONDS": str(THRESHOLD),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_FR_BUFFER_SIZE": "100",
    }
    on_the_host = {"ACCELERATE_USE_CPU": "true"}
    on_simulated_devices = {
        "FAULTS_ON_SIMULATED_ACCELERATORS": "1",
        "SIMULATED_ACCELERATOR_DEVICES": "4",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # DDP has no clock for such a device
    }
    environment |= on_simulated_devices if on_devices else on_the_host
    command = [sys.executable, str(FAULTS), str(folder), *names]
    warm.run(command, env=os.environ | environment, check=True, timeout=900)


def read(folder: Path, name: str) -> list[Ended]:
    return [Ended((folder / f"{name}.{rank}").read_text()) for rank in range(4)]


def line_of(fault: str, mark: str) -> str:
    """Return "faults.py:17" for the line of a fault's function that has the mark in its comment."""
    inside = False
    for number, text in enumerate(FAULTS.read_text().splitlines(), start=1):
        if text.startswith("def "):
            inside = text.startswith(f"def {fault}(")
        if inside and mark in text.partition("#")[2]:
            return f"faults.py:{number}"
    raise LookupError(f"{fault} has no line marked {mark}")


DISAGREEMENTS = {  # who is named, and a part of the rule
    "gather_on_one_rank": ("rank 0", "is inside `if training.accelerator.is_main_process:`"),
    "different_order": ("rank 2", "is inside `if training.rank == 2:`"),
    "early_break": ("rank 3", "a loop that ends earlier"),
    "unequal_loaders": ("rank 3", "a shorter loader"),
    "swallowed_exception": ("rank 2", "an exception that was caught there"),
}
MISSING = {
    "killed": (1, "is dead"),
    "first_rank_killed": (0, "is dead"),
    "sys_exit": (1, "has left: sys.exit(0) at"),
    "first_rank_exits": (0, "has left: sys.exit(0) at"),
    "unused_parameters": (1, "has failed: RuntimeError: Expected to have finished reduction"),
}
LATE = ("late_and_exited", "late_for_main_process_first", "download_in_native_code")
NO_FAULTS = ("busy_first_rank", "stopped", "debugged", "upload_in_a_thread", *LATE)
OTHERS = ("ragged_shapes", "last_call_on_one_rank", "handled_exception", "lock_and_collective", "in_a_thread")
MAIN_PROCESS_FIRST = (
    "slow_main_process_first",
    "failing_main_process_first",
    "first_rank_killed_in_main_process_first",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_once(tmp_path_factory, "faults", [*DISAGREEMENTS, *MISSING, *NO_FAULTS, *OTHERS, *MAIN_PROCESS_FIRST])


def run_once(factory: pytest.TempPathFactory, name: str, faults: Iterable[str], *, on_devices: bool = False) -> Path:
    """Run faults once, also where several processes of pytest share the tests; return where their outputs are."""
    parts = factory.getbasetemp()
    where = (parts.parent if "PYTEST_XDIST_WORKER" in os.environ else parts) / name
    with FileLock(where.with_suffix(".lock")):
        if not where.exists():
            where.mkdir()
            run(where, *faults, on_devices=on_devices)
    return where


def verdicts(ended: list[Ended], survivors: set[int]) -> list[str]:
    """Return the verdict of each survivor, after checking that it failed with one."""
    reported = []
    for rank in sorted(survivors):
        assert ended[rank].code == 1, ended[rank].printed
        assert ended[rank].reported_after >= 0
        own = [text for text in ended[rank].printed.splitlines() if re.search(rf"\bRank {rank}: ", text)]
        assert own, ended[rank].printed
        reported.append(own[0])
    return reported


@pytest.mark.parametrize("fault", DISAGREEMENTS)
def test_ranks_that_wait_in_different_calls_learn_whose_call_it_was(folder: Path, fault: str) -> None:
    culprit, rule = DISAGREEMENTS[fault]
    for text in verdicts(read(folder, fault), {0, 1, 2, 3}):
        assert f"() was called on {culprit} only ({line_of(fault, 'CULPRIT')})" in text
        assert rule in text
        if fault == "different_order":
            assert f"wait in reduce() ({line_of(fault, 'WAITS')})" in text


@pytest.mark.parametrize("fault", MISSING)
def test_ranks_that_wait_for_a_missing_one_learn_its_state(folder: Path, fault: str) -> None:
    culprit, how = MISSING[fault]
    for text in verdicts(read(folder, fault), {0, 1, 2, 3} - {culprit}):
        assert f"Rank {culprit} {how}" in text
        assert f"({line_of(fault, 'WAITS')})" in text
        if "has " in how:
            assert line_of(fault, "CULPRIT") in text


def test_the_last_call_of_a_script_on_one_rank_is_reported_with_its_condition(folder: Path) -> None:
    (text,) = verdicts(read(folder, "last_call_on_one_rank"), {0})
    assert re.search(r"Ranks? .* ha(s|ve) left: its script has ended", text)
    where = line_of("_evaluate", "CULPRIT")
    assert f"{where} is inside `if training.accelerator.is_main_process:`" in text
    assert "of faults.py. Move the call out of the condition" in text
    assert "a `break`" not in text


@pytest.mark.skipif(not ALONE, reason="needs a machine of its own: nightly")
def test_nearly_all_report_in_time(folder: Path) -> None:
    files = [file for fault in (*DISAGREEMENTS, *MISSING) for file in folder.glob(f"{fault}.?")]
    reported = [Ended(file.read_text()).reported_after for file in files if "reported after" in file.read_text()]
    assert len(reported) > 20
    assert sorted(reported)[len(reported) * 3 // 4] <= SECONDS_TO_REPORT


def test_what_torchs_flight_recorder_has_is_attached(folder: Path) -> None:
    for each in read(folder, "different_order"):
        recorded = re.findall(r"recorded on (.*): gloo:(\w+) number \d+\(.*\), scheduled from (.*)", each.printed)
        assert sorted(recorded) == [
            ("rank 2", "all_gather", line_of("different_order", "CULPRIT")),
            ("ranks 0-1, 3", "all_reduce", line_of("different_order", "WAITS")),
        ]


def test_ragged_shapes_are_reported_by_rank(folder: Path) -> None:
    ended = read(folder, "ragged_shapes")
    alive = {rank for rank in range(4) if ended[rank].code == 1}  # gloo itself aborts one that receives too much
    assert alive >= {1}
    assert len(alive) >= 2
    for text in verdicts(ended, alive):
        assert f"different shapes to gather() ({line_of('ragged_shapes', 'CULPRIT')})" in text
        assert "rank 1: all_gather_" in text
        assert "float32[4])" in text


def test_an_exception_that_is_being_handled_is_named(folder: Path) -> None:
    ended = read(folder, "handled_exception")
    verdicts(ended, {0, 1, 2, 3})
    where = line_of("handled_exception", "CULPRIT")
    for each in ended:
        assert f"while handling ValueError: bad sample ({where}" in each.printed


def test_a_lock_across_a_collective(folder: Path) -> None:
    fault = "lock_and_collective"
    for text in verdicts(read(folder, fault), {0, 1, 2, 3}):
        assert f"Rank 1 waits at a lock ({line_of(fault, 'CULPRIT')})" in text
        assert re.search(rf"while ranks? .* waits? in wait_for_everyone\(\) \({line_of(fault, 'WAITS')}\)", text)


@pytest.mark.parametrize(
    ("fault", "notice"),
    [
        ("busy_first_rank", "Rank 0 is busy at"),
        ("upload_in_a_thread", "Rank 0 is busy at"),
        ("download_in_native_code", "Rank 0 is busy at"),
        ("late_for_main_process_first", "Rank 3 is busy at"),
        ("debugged", "Rank 1 is in a debugger at"),
        ("stopped", "Rank 1 is stopped (process"),
    ],
)
def test_a_rank_that_may_come_back_is_waited_for(folder: Path, fault: str, notice: str) -> None:
    ended = read(folder, fault)
    assert [each.code for each in ended] == [0, 0, 0, 0], [each.printed for each in ended]
    printed = "".join(each.printed for each in ended)
    assert notice in printed
    assert line_of(fault, "WAITS") in printed
    assert "Error" not in printed
    if fault == "late_for_main_process_first":
        assert "main_process_first() (" in printed
    if fault == "busy_first_rank":
        assert line_of(fault, "CULPRIT") in printed
        waits = [
            int(seconds) for seconds in re.findall(rf"ranks 1-3 +{line_of(fault, 'WAITS')}.*, for (\d+) s", printed)
        ]
        assert 1 <= len(waits) <= 3  # at 1, 2 and 4 times the threshold, or later: 5 times are waited for
        assert all(later >= 1.6 * earlier for earlier, later in zip(sorted(waits), sorted(waits)[1:], strict=False))


def test_nobody_is_judged_by_a_report_that_is_no_longer_true(folder: Path) -> None:
    for each in read(folder, "late_and_exited"):
        assert each.code == 0, each.printed
        assert "Error" not in each.printed


def test_an_accelerator_of_another_thread_raises_in_that_thread(folder: Path) -> None:
    ended = read(folder, "in_a_thread")
    reported = [
        each for each in ended if "raised in its thread: Rank" in each.printed or "StuckError: Rank" in each.printed
    ]
    assert len(reported) == 4, [each.printed for each in ended]
    assert any("raised in its thread: Rank" in each.printed for each in ended)
    where = line_of("_train_in_a_thread", "CULPRIT")
    assert all(f"gather() was called on rank 2 only ({where})" in each.printed for each in reported)


def test_main_process_first_outlasts_the_backend_and_failures(folder: Path) -> None:
    for each in read(folder, "slow_main_process_first"):  # the group's timeout is 5 s
        assert each.code == 0, each.printed
        assert int(re.findall(r"continued after (\d+)", each.printed)[0]) >= 12
    first, *others = read(folder, "failing_main_process_first")
    assert first.code == 1
    for rank, each in enumerate(others, start=1):
        assert each.code == 0
        assert (
            f"Rank 0 failed with ValueError: no such file in the block that it ran first. Rank {rank}" in each.printed
        )
    _, *others = read(folder, "first_rank_killed_in_main_process_first")
    assert all(each.code == 1 and each.reported_after > 0 for each in others)


def test_health_is_silent(tmp_path: Path) -> None:
    run(tmp_path, "healthy", "group_closed_by_its_user")
    for each in (*read(tmp_path, "healthy"), *read(tmp_path, "group_closed_by_its_user")):
        assert each.printed == "finished\n\nexit code 0", each.printed
