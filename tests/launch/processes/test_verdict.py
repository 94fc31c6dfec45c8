"""When a run dies, the last thing printed names the true culprit and the cause: real runs of four processes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.launch.processes.verdict import Ending, judge, panel
from tests.launching import COMMAND, Launched, environment, run_accelerate
from tests.timing import limit

FAULTS = Path(__file__).with_name("faults.py")


def launch_fault(kind: str, culprit: int, directory: Path, **variables: str) -> Launched:
    shutil.copy(FAULTS, directory / "train.py")
    words = ["launch", "--cpu", "--num_processes", 4, "train.py", kind, culprit]
    launched = run_accelerate(*words, directory=directory, **variables)
    assert time.time() - float((directory / "fault_time").read_text()) < limit(15)
    return launched


def line_of(text: str) -> int:
    return FAULTS.read_text().splitlines().index(text) + 1


@pytest.mark.parametrize(
    ("kind", "culprit", "code", "cause"),
    [
        ("exception", 2, 1, "ValueError: the label 17 is out of range"),
        ("late", 0, 1, "KeyError: 'missing'"),
        ("exit", 1, 3, "called sys.exit with code 3"),
        ("kill", 3, 137, "killed by SIGKILL"),
        ("crash", 1, 139, "killed by SIGSEGV"),
        ("worker", 2, 1, "IndexError: sample 11 is broken"),
    ],
)
def test_one_rank_fails_and_is_named_with_the_cause(
    kind: str, culprit: int, code: int, cause: str, tmp_path: Path
) -> None:
    launched = launch_fault(kind, culprit, tmp_path)
    assert f"rank {culprit} failed first" in launched.panel
    assert cause in launched.panel
    assert launched.code == code
    others = [rank for rank in range(4) if rank != culprit]
    [collateral] = re.findall(r"^ collateral .*\n(?:  .*\n)*", launched.panel, re.MULTILINE)  # it may be wrapped
    assert all(str(rank) in collateral for rank in others), f"the victims are called collateral:\n{launched.panel}"
    if kind != "kill":
        assert f"train.py:{line_of('            go_wrong()')}" in launched.panel, "the user's own frame is shown"


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("everywhere", "ValueError: the label 17 is out of range"),
        ("import", "ModuleNotFoundError: No module named 'a_module_that_does_not_exist'"),
    ],
)
def test_every_rank_fails_in_the_same_place(kind: str, cause: str, tmp_path: Path) -> None:
    launched = launch_fault(kind, 0, tmp_path)
    assert launched.code == 1
    assert cause in launched.panel
    assert "in the same place" in launched.panel
    assert "also " not in launched.panel


def test_ranks_that_wait_for_each_other_are_shown_with_the_rule_and_their_lines(tmp_path: Path) -> None:
    launched = launch_fault("stuck", 2, tmp_path, MESHWRIGHT_HANG_SECONDS="2")
    lines = [line.strip() for line in launched.panel.splitlines()]
    text = " ".join(lines)
    here, there = (
        line_of("            PartialState().wait_for_everyone()"),
        line_of("        accelerator.reduce(torch.ones(8))"),
    )
    assert f"wait_for_everyone() was called on rank 2 only (train.py:{here})" in text
    assert f"ranks 0-1, 3 wait in reduce() (train.py:{there})" in text
    assert lines[1].startswith("wait_for_everyone() was called on rank 2 only"), "what the watcher says comes first"
    assert "try Look for a condition that differs between ranks" in " ".join(text.split())
    assert "collateral" not in launched.panel
    assert all(len(line) <= 100 for line in launched.panel.splitlines())
    assert launched.code == 1


@pytest.mark.parametrize("options", [(), ("--log_dir", "logs")], ids=["no folder", "a folder"])
def test_the_tracebacks_of_a_hang_are_in_files_and_not_above_the_panel(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    shutil.copy(FAULTS, tmp_path / "train.py")
    words = ["launch", "--cpu", "--num_processes", 2, *options, "train.py", "stuck", 1]
    launched = run_accelerate(*words, directory=tmp_path, MESHWRIGHT_HANG_SECONDS="2", TMPDIR=str(tmp_path))
    assert launched.code == 1
    assert "Traceback" not in launched.complaints
    assert "StuckError" not in launched.complaints
    (folder,) = [tmp_path / "logs"] if options else tmp_path.glob("meshwright-tracebacks-*")
    assert folder.name in launched.panel
    tracebacks = {file.name: file.read_text() for file in folder.rglob("traceback_rank_*.txt")}
    assert sorted(tracebacks) == ["traceback_rank_0.txt", "traceback_rank_1.txt"]
    assert all("Traceback" in text and "StuckError: Rank" in text for text in tracebacks.values())
    assert "PartialState().wait_for_everyone()" in tracebacks["traceback_rank_1.txt"]


UNEVEN = """
import torch
from meshwright import Accelerator

accelerator = Accelerator()
model = accelerator.prepare(torch.nn.Linear(4, 2))
for _ in range(2 + accelerator.process_index):
    accelerator.backward(model(torch.ones(2, 4)).sum())
"""
RAGGED = """
import torch
from meshwright import Accelerator

accelerator = Accelerator()
accelerator.gather_for_metrics({"logits": torch.ones(3 + accelerator.process_index, 2)})
"""


def test_a_rank_that_ends_earlier_is_named_before_the_rank_that_lost_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UNEVEN)
    launched = run_accelerate("launch", "--cpu", "--num_processes", 2, "train.py", directory=tmp_path)
    lines, words = launched.panel.splitlines(), " ".join(launched.panel.split())  # wrapped to whatever width there is
    assert "rank 0 has left: its script has ended, and rank 1 waits for it in backward() (train.py:8)" in words
    assert lines[1].startswith(" rank 0 has left: its script has ended")
    assert "Connection closed by peer" not in words
    assert "Hand the data loader to prepare()" in words
    assert "python script.py" not in words
    assert all(len(line) <= 100 for line in lines)
    assert launched.code == 1


def test_different_shapes_that_end_a_process_are_named_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RAGGED)
    launched = run_accelerate("launch", "--cpu", "--num_processes", 2, "train.py", directory=tmp_path)
    lines = launched.panel.splitlines()
    assert lines[1] == " the ranks brought different shapes to gather() (train.py:6)"
    assert lines[2:4] == ["   rank 0: gather(float32[3, 2])", "   rank 1: gather(float32[4, 2])"]
    assert "pad_across_processes" in launched.panel


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A control group with 3 GiB: the folder into whose `cgroup.procs` a process writes itself."""
    for root, setting in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = root / f"accelerate_{uuid.uuid4().hex[:8]}"
        try:
            group.mkdir()
            (group / setting).write_text(str(3 << 30))
        except OSError:
            continue
        yield group
        for _ in range(50):
            try:
                group.rmdir()
                return
            except OSError:
                os.sched_yield()
        return
    pytest.skip("control groups for memory cannot be made here")


def test_an_out_of_memory_kill_is_told_from_other_kills(small_memory: Path, tmp_path: Path) -> None:
    shutil.copy(FAULTS, tmp_path / "train.py")
    inside = tmp_path / "inside.sh"
    inside.write_text(f'echo $$ > {small_memory}/cgroup.procs\nexec "$@"\n')
    words = ["sh", inside, COMMAND, "launch", "--cpu", "--num_processes", "4", "train.py", "memory", "2"]
    ended = subprocess.run(
        list(map(str, words)), cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=100
    )
    assert "rank 2 failed first: killed by the kernel, which ran out of memory" in ended.stderr
    assert "a smaller batch" in ended.stderr
    assert ended.returncode == 137


def ending(rank: int, code: int, text: str = "", *, when: float = 0.0, by_launcher: bool = False) -> Ending:
    record = {"type": text.partition(":")[0], "text": text, "cause": None, "frames": [], "time": when} if text else None
    return Ending(rank=rank, local_rank=rank, exit_code=code, record=record, ended_by_launcher=by_launcher)


GLOO = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:55988"


def test_a_victim_that_is_seen_first_is_not_blamed() -> None:
    verdict = judge(
        [ending(0, 1, GLOO, when=1.0), ending(1, -9), ending(2, -15, by_launcher=True)], out_of_memory=False
    )
    assert verdict.culprit.rank == 1
    assert [victim.rank for victim in verdict.collateral] == [2, 0]
    assert verdict.exit_code == 137


def test_of_two_own_failures_the_earlier_is_the_culprit_and_the_other_is_told() -> None:
    verdict = judge(
        [ending(0, 1, "ValueError: b", when=2.0), ending(1, 1, "KeyError: a", when=1.0)], out_of_memory=False
    )
    assert verdict.culprit.rank == 1
    drawn = panel(verdict, machine_rank=0, num_machines=1, logs="/logs")
    assert "also       rank 0: ValueError" in drawn
    assert "logs       /logs" in drawn


def test_where_all_only_lost_a_peer_the_cause_is_sought_on_another_machine() -> None:
    verdict = judge([ending(4, 1, GLOO, when=2.0), ending(5, 1, GLOO, when=1.0)], out_of_memory=False)
    assert verdict.elsewhere
    assert verdict.culprit.rank == 5
    assert "another machine" in panel(verdict, machine_rank=1, num_machines=2, logs=None)


DIAGNOSIS = (
    "Rank 4 has left: its script has ended, and rank 5 waits for it in gather() (train.py:9). train.py:9 is inside "
    "`if accelerator.is_main_process:` (line 8). Move the call out of the condition.\n  rank 5  train.py:9"
)


def test_what_the_watcher_found_out_about_a_lost_peer_comes_first() -> None:
    diagnosed = ending(5, 1, GLOO, when=2.0)
    assert diagnosed.record is not None
    diagnosed.record["diagnosis"] = DIAGNOSIS
    verdict = judge([ending(3, 1, GLOO, when=1.0), diagnosed], out_of_memory=False)
    drawn = panel(verdict, machine_rank=0, num_machines=2, logs=None).splitlines()
    assert drawn[2].startswith(" rank 4 has left: its script has ended, and rank 5 waits for it in gather()")
    assert "another machine" not in "".join(drawn)
    assert " try        Move the call out of the condition." in drawn


def test_ranks_that_were_told_why_they_wait_are_collateral_of_the_rank_that_failed() -> None:
    waiting = ending(0, 1, "StuckError: Rank 1 is dead, and rank 0 waits for it in reduce() (train.py:9).", when=2.0)
    verdict = judge([waiting, ending(1, -9), ending(2, 1, GLOO, when=1.0)], out_of_memory=False)
    assert verdict.culprit.rank == 1
    drawn = panel(verdict, machine_rank=0, num_machines=1, logs=None)
    assert "collateral rank 2 lost the connection to it; rank 0 waited for it" in drawn
    assert "also " not in drawn
    later = ending(1, 1, "ValueError: at the end", when=3.0)
    assert judge([waiting, later], out_of_memory=False).culprit.rank == 0, "what came later is not the cause"


def test_a_long_message_is_wrapped() -> None:
    drawn = panel(
        judge([ending(0, 1, f"ValueError: {'word ' * 60}")], out_of_memory=False),
        machine_rank=0,
        num_machines=1,
        logs=None,
    )
    assert all(len(line) <= 100 for line in drawn.splitlines())


def test_a_process_that_is_ended_for_another_reason_is_not_blamed_for_shapes() -> None:
    calls = ((3, "gather(float32[2])"), (4, "gather(float32[3])"))
    aborted = replace(ending(0, -6), calls=calls)
    assert not judge([aborted, replace(ending(1, 1, GLOO), calls=calls)], out_of_memory=False).shapes
    other = replace(ending(1, 1, GLOO), calls=((4, "gather(float32[2])"), (5, "reduce(float32[2])")))
    assert judge([aborted, other], out_of_memory=False).shapes == {0: "gather(float32[3])", 1: "gather(float32[2])"}
    assert not judge([replace(aborted, exit_code=-11), other], out_of_memory=False).shapes


def test_shapes_that_differ_are_found_also_where_the_host_has_gone_on() -> None:
    def calls(shape: str) -> tuple[tuple[int, str], ...]:
        return (3, f"gather({shape})"), (4, "reduce(float32[1])"), (5, "gather(float32[8])")

    aborted = replace(ending(0, -6), calls=calls("float32[2]"))
    other = replace(ending(1, 1, GLOO), calls=calls("float32[3]"))
    assert judge([aborted, other], out_of_memory=False).shapes == {0: "gather(float32[2])", 1: "gather(float32[3])"}


def test_a_program_without_python_is_judged_by_its_exit_code(tmp_path: Path) -> None:
    words = ("launch", "--cpu", "--num_processes", 2, "--no_python", "sh", "-c", 'test "$RANK" = 0 || exit 7; sleep 60')
    launched = run_accelerate(*words, directory=tmp_path)
    assert "rank 1 failed first: ended with exit code 7" in launched.panel
    assert launched.code == 7


def test_quiet_says_it_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('no')")
    launched = run_accelerate("launch", "--cpu", "--num_processes", 2, "-q", "train.py", directory=tmp_path)
    assert "the run failed" not in launched.complaints
    assert launched.complaints.rstrip().splitlines()[-1].endswith("failed first: ValueError")


def test_each_failed_attempt_is_told_before_the_next(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] != '2': raise OSError('disk')\nprint('done')"
    )
    words = ("launch", "--cpu", "--num_processes", 2, "--max_restarts")
    launched = run_accelerate(*words, 2, "train.py", directory=tmp_path)
    assert launched.code == 0
    assert launched.printed.split() == ["done", "done"]
    assert launched.complaints.count("failed first: OSError; restarting") == 2
    assert "attempts   2" in run_accelerate(*words, 1, "train.py", directory=tmp_path).panel


FRAME = {"file": "train.py", "line": 7, "function": "main", "source": "go()"}


def raised(rank: int, **record: object) -> Ending:
    """Return the ending of a rank by an exception."""
    told = {"type": "ValueError", "text": "ValueError: no", "cause": None, "diagnosis": None, "time": 1.0 + rank}
    return Ending(rank=rank, local_rank=rank, exit_code=1, record=told | {"frames": [FRAME]} | record)


@pytest.mark.parametrize(
    ("endings", "said", "unsaid"),
    [
        ((raised(0), raised(1)), ("rank 1 failed in the same place", "the same script in one process"), "way"),
        (
            (raised(0, text="KeyError: 'cat'", type="KeyError"), raised(1, text="KeyError: 'dog'", type="KeyError")),
            ("also rank 1: KeyError: 'dog' (train.py:7)",),
            "same",
        ),
        (
            (raised(0), raised(1, frames=[FRAME | {"line": 3}, FRAME])),
            ("also rank 1: ValueError: no (train.py:7)",),
            "same",
        ),
        (
            (raised(0, text="ValueError: device 0"), raised(1, text="ValueError: device 1")),
            ("rank 1 failed in the same place",),
            "also",
        ),
        (
            (raised(0), raised(1), raised(2, text="ValueError: yes")),
            ("rank 1 failed in the same place", "also rank 2: ValueError: yes (train.py:7)"),
            "one process",
        ),
        (
            tuple(raised(rank, text="ValueError: the mesh needs 4 processes") for rank in (0, 1)),
            ("rank 1 failed in the same place",),
            "one process",
        ),
        ((raised(0, frames=[]), raised(1, frames=[])), ("rank 1 failed in the same way",), "same place"),
        (
            tuple(raised(rank, type="StuckError", text="StuckError: ranks wait. Look for it.") for rank in (0, 1)),
            ("Look for it.",),
            "same place",
        ),
        ((raised(0),), ("the lines above",), "one process"),
    ],
)
def test_the_panel_says_what_ranks_have_in_common_only_where_they_have_it(
    endings: tuple[Ending, ...], said: tuple[str, ...], unsaid: str
) -> None:
    text = " ".join(panel(judge(endings, out_of_memory=False), machine_rank=0, num_machines=1, logs=None).split())
    assert all(words in text for words in said), text
    assert unsaid not in text
