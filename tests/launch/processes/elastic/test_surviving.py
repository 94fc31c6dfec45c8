"""`--survive`: a process that dies is replaced while the others go on; real launches, with kills."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from meshwright.runtime.membership.events import connect
from tests.launching import Launched, end_tree, run_accelerate, start_accelerate
from tests.strangers import beyond_loopback, listening, strangers
from tests.timing import limit

REPLICAS = Path(__file__).with_name("replicas.py")


class Run:
    """A launch of replicas that can be killed one by one."""

    def __init__(self, directory: Path, *options: object, processes: int = 3, fault: str = "") -> None:
        self.directory = directory
        words = ("launch", "--cpu", "--num_processes", processes, "--survive", *options, REPLICAS, fault)
        self.launcher = start_accelerate(*words, directory=directory)
        self.started = time.monotonic()
        self.wait_for(*(f"member_{rank}_0" for rank in range(processes)))

    def wait_for(self, *names: str, seconds: float = 120) -> None:
        until = time.monotonic() + seconds
        while missing := [name for name in names if not (self.directory / name).exists()]:
            if time.monotonic() > until or self.launcher.poll() is not None:
                left = "" if self.launcher.poll() is not None else end_tree(self.launcher.pid)
                pytest.fail(f"{missing} were not written.\n{left}\n{self.launcher.communicate()}")
            time.sleep(0.01)

    def pid(self, rank: int, incarnation: int) -> int:
        return int((self.directory / f"pid_{rank}_{incarnation}").read_text())

    def kill(self, *processes: tuple[int, int]) -> None:
        """Kill processes, given by rank and incarnation."""
        for rank, incarnation in processes:
            os.kill(self.pid(rank, incarnation), signal.SIGKILL)

    def touch(self, name: str) -> None:
        (self.directory / name).touch()

    def end(self, *names: str) -> Launched:
        for name in names:
            self.touch(name)
        printed, complaints = self.launcher.communicate(timeout=limit(60))
        seconds = time.monotonic() - self.started
        return Launched(code=self.launcher.returncode, printed=printed, complaints=complaints, seconds=seconds)


def said(launched: Launched) -> list[str]:
    """Return the launcher's own lines."""
    return re.findall(r"^meshwright launch: (.*)$", launched.complaints, re.MULTILINE)


def test_a_stranger_at_the_ports_and_in_the_store_does_not_end_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, processes=2)
    assert beyond_loopback(run.launcher.pid) == []
    places = list(listening(run.launcher.pid))
    assert len(places) == 2
    store = connect((tmp_path / "store_0").read_text())
    for key, text in {
        "event/1": "not json",
        "event/2": '{"kind": "joined", "ranks": [7]}',
        "note/1": "[",
        "cost/1": "x",
    }.items():
        store.set(key, text)
    with strangers(places, 100):
        run.kill((1, 0))
        run.wait_for("member_1_1", "left_3")
    launched = run.end("finish")
    assert launched.code == 0, launched.complaints
    lines = said(launched)
    ignored = "nobody has left or joined by it, and the run goes on. Another program wrote it."
    assert [
        line
        for line in lines
        if line.startswith("event/1 in the store of the run is damaged: ") and line.endswith(ignored)
    ]
    assert f"event/2 in the store of the run is damaged: it lacks the field 'reason': {ignored}" in lines
    assert "rank 1 was killed by SIGKILL; 1 replica continues, a replacement is starting." in lines


def test_killed_processes_are_replaced_and_the_others_keep_running(tmp_path: Path) -> None:
    run = Run(tmp_path)
    killed = time.time()
    run.kill((1, 0))
    run.wait_for("member_1_1", "left_1")
    assert float((tmp_path / "left_1").read_text()) - killed < limit(0.15), "the others were told at once"
    run.kill((1, 1), (0, 0))  # rank 0 too, and a replacement
    run.wait_for("member_0_1", "member_1_2")
    assert psutil.pid_exists(run.pid(2, 0))
    launched = run.end("finish")
    assert launched.code == 0, launched.complaints
    lines = said(launched)
    assert lines[0] == "rank 1 was killed by SIGKILL; 2 replicas continue, a replacement is starting."
    assert "rank 1 has joined; 3 replicas train." in lines
    last = [line for line in lines if "killed by SIGKILL; 1 replica continues, a replacement is starting." in line]
    assert last, "whichever of the two ended last"
    assert re.fullmatch(r"3 replacements, 0\.(5|8) s lost of \d+ s\.", lines[-1]), lines
    assert not (tmp_path / "pid_2_1").exists()


def test_a_replica_of_two_processes_leaves_and_is_replaced_whole(tmp_path: Path) -> None:
    run = Run(tmp_path, processes=4, fault="in_pairs")
    left = psutil.Process(run.pid(2, 0))
    run.kill((3, 0))
    run.wait_for("member_2_1", "member_3_1", "left_1")
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE
    run.kill((0, 0), (1, 0))  # both of them at once
    run.wait_for("member_0_1", "member_1_1")
    launched = run.end("finish")
    assert launched.code == 0, launched.complaints
    lines = said(launched)
    killed = "rank 3 was killed by SIGKILL; its replica (ranks 2, 3) leaves; 1 replica continues"
    assert lines[:2] == [f"{killed}, a replacement is starting.", "ranks 2, 3 have joined; 2 replicas train."]
    assert "ranks 0, 1 have joined; 2 replicas train." in lines
    assert lines[-1].startswith("2 replacements, "), lines
    assert not list(tmp_path.glob("pid_*_2"))


def test_a_replacement_whose_join_was_disturbed_may_ask_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.kill((1, 0))
    run.wait_for("member_1_1")
    time.sleep(0.3)
    run.touch("retract_1")
    run.wait_for("back_1")
    launched = run.end("finish")
    assert launched.code == 0, launched.complaints
    assert "is killed" not in launched.complaints
    assert not (tmp_path / "pid_1_2").exists()


def test_an_exception_that_comes_three_times_in_the_same_line_ends_the_run(tmp_path: Path) -> None:
    launched = run_accelerate(
        *("launch", "--cpu", "--num_processes", 3, "--survive", REPLICAS, "training_1"), directory=tmp_path
    )
    lines = said(launched)
    starting = "rank 1 failed (ValueError); 2 replicas continue, a replacement is starting."
    assert lines.count(starting) == 2
    assert "the same failure (ValueError) came 3 times, now on rank 1: the run ends." in lines
    assert "rank 1 failed first: ValueError" in launched.panel
    assert "the label 17 is out of range" in launched.panel
    assert launched.code == 1


def test_three_replacements_that_fail_before_they_join_end_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, fault="joining")
    run.kill((2, 0))
    launched = run.end()
    lines = said(launched)
    early = "rank 2 failed (ValueError) before it had joined; 2 replicas continue, a replacement is starting."
    assert lines.count(early) == 2
    assert "3 replacements of rank 2 in a row have failed before they joined: the run ends." in lines
    assert "rank 2 failed first: ValueError" in launched.panel
    assert launched.code == 1


def test_before_training_begins_a_failure_ends_the_run_as_without_survive(tmp_path: Path) -> None:
    words = ("launch", "--cpu", "--num_processes", 2, "--survive", REPLICAS, "starting_1")
    launched = run_accelerate(*words, directory=tmp_path)
    assert said(launched) == []
    assert "rank 1 failed first: ValueError" in launched.panel


@pytest.mark.parametrize("restarts", [0, 1])
def test_when_all_members_die_the_run_ends_or_restarts(restarts: int, tmp_path: Path) -> None:
    run = Run(tmp_path, "--max_restarts", restarts, processes=2)
    pids = [run.pid(rank, 0) for rank in range(2)]
    for rank in range(2):
        (tmp_path / f"member_{rank}_0").unlink()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    if restarts == 0:
        launched = run.end()
        assert "killed by SIGKILL" in launched.panel
        assert launched.code == 137
        return
    run.wait_for("member_0_0", "member_1_0")
    assert {run.pid(rank, 0) for rank in range(2)}.isdisjoint(pids)
    run.kill((1, 0))  # the members of the next attempt are new ones
    run.wait_for("member_1_1")
    launched = run.end("finish")
    assert launched.code == 0, launched.complaints
    assert any("restarting (0 more after this)" in line for line in said(launched))


def test_a_process_that_dies_when_the_others_have_ended_well_is_not_replaced(tmp_path: Path) -> None:
    run = Run(tmp_path, processes=2)
    other = psutil.Process(run.pid(0, 0))
    run.touch("finish_0")
    psutil.wait_procs([other], timeout=20)
    time.sleep(2)  # the launcher looks ten times a second
    run.kill((1, 0))
    launched = run.end()
    assert "rank 1 failed: killed by SIGKILL" in launched.panel
    assert launched.code == 137


def test_a_replacement_that_has_not_joined_does_not_outlive_training(tmp_path: Path) -> None:
    run = Run(tmp_path, fault="never_joining")
    run.kill((1, 0))
    run.wait_for("pid_1_1")
    launched = run.end("finish")
    assert launched.code == 0, launched.complaints
    assert "training is over: the replacements that have not joined are not needed any more." in said(launched)
    assert not psutil.pid_exists(run.pid(1, 1))


def test_a_process_that_the_others_removed_is_killed_and_replaced(tmp_path: Path) -> None:
    run = Run(tmp_path)
    os.kill(run.pid(1, 0), signal.SIGSTOP)
    run.touch("remove_1")
    run.wait_for("member_1_1")
    assert not psutil.pid_exists(run.pid(1, 0))
    launched = run.end("finish")
    assert launched.code == 0, launched.complaints
    assert said(launched)[0] == "the others go on without rank 1 (it does not answer): its process is killed."


def test_a_termination_signal_reaches_the_members_and_replacements_do_not_shorten_their_time(tmp_path: Path) -> None:
    run = Run(tmp_path, fault="never_joining")
    run.kill((1, 0))
    run.wait_for("pid_1_1")
    run.launcher.send_signal(signal.SIGTERM)
    launched = run.end()
    assert launched.code == 75, launched.complaints
    assert "the processes saved and left, to be started again (exit code 75)." in said(launched)


def test_the_output_of_a_replacement_has_files_of_its_own_and_is_shown_like_that_of_its_rank(tmp_path: Path) -> None:
    run = Run(tmp_path, "--log_dir", "logs", "--tee", "3", processes=2)
    run.kill((1, 0))
    run.wait_for("member_1_1")
    launched = run.end("finish")
    assert launched.code == 0, launched.complaints
    [output] = (tmp_path / "logs").glob("*/attempt_0/1/replacement_1/stdout.log")
    assert output.read_text() == "rank 1 of 2, process 1\n"
    assert "[rank 1] rank 1 of 2, process 1\n" in launched.printed
