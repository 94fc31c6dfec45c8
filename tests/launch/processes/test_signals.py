"""Ctrl-C, SIGTERM and SIGKILL: time to save, and no process left behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.launching import COMMAND, start_accelerate
from tests.sizes import at_night, sized
from tests.warm import COLD

MOMENTS = sized(gate=3, nightly=200)

# Ranks that compute together, read data in workers and have a program of their own running.
TRAINING = """
import subprocess, time
import torch
from torch.utils.data import DataLoader
from meshwright import Accelerator

accelerator = Accelerator()
helper = subprocess.Popen(["sleep", "600"])
loader = accelerator.prepare(DataLoader(range(10_000), num_workers=1))
if accelerator.is_main_process:
    open("running", "w").close()
for batch in loader:
    accelerator.reduce(torch.ones(8))
    time.sleep(0.01)
"""

SAVING = """
import os, signal, sys, time

def save(number, frame):
    time.sleep(0.5)
    open(f"saved_{os.environ['RANK']}_{number}", "w").close()
    sys.exit(0)

signal.signal(signal.SIGINT, save)
signal.signal(signal.SIGTERM, save)
open("running_" + os.environ["RANK"], "w").close()
time.sleep(600)
"""

DEAF = """
import os, signal, time

signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("running_" + os.environ["RANK"], "w").close()
time.sleep(600)
"""


class Run:
    """A launch whose processes can be found by a mark in their environment."""

    def __init__(self, directory: Path, script: str, *options: object, **variables: str) -> None:
        (directory / "train.py").write_text(script)
        self.directory = directory
        self.mark = uuid.uuid4().hex
        words = ("launch", "--cpu", "--num_processes", 2, *options, "train.py")
        variables |= {"MESHWRIGHT_TEST_MARK": self.mark, COLD: "1"}  # the kernel shows the environment of a real start
        self.launcher = start_accelerate(*words, directory=directory, **variables)

    def wait_for(self, *names: str) -> None:
        for name in names:
            wait_until((self.directory / name).exists, 60, f"{name} was not written")

    def ctrl_c(self) -> None:
        os.killpg(self.launcher.pid, signal.SIGINT)

    def end(self, seconds: float) -> tuple[int, str]:
        try:
            _, complaints = self.launcher.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as late:
            said = (late.stderr or b"").decode()  # bytes, whatever was asked for
            pytest.fail(f"the launcher was still there after {seconds} s; so were {self.left()}. It said:\n{said}")
        return self.launcher.returncode, complaints

    def left(self) -> list[str]:
        return [line for process in psutil.process_iter() if (line := self.line_of(process)) is not None]

    def line_of(self, process: psutil.Process) -> str | None:
        try:
            is_ours = process.environ().get("MESHWRIGHT_TEST_MARK") == self.mark and process.status() != "zombie"
            return f"{process.pid} {process.cmdline()}" if is_ours else None
        except psutil.Error:  # it ended this moment
            return None

    def expect_nobody(self, seconds: float = 10) -> None:
        wait_until(lambda: not self.left(), seconds, "processes were left", self.left)


def wait_until(
    happened: Callable[[], bool], seconds: float, complaint: str, detail: Callable[[], object] = str
) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            pytest.fail(f"{complaint} within {seconds} s: {detail()}")
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_gives_the_processes_time_to_save(number: signal.Signals, tmp_path: Path) -> None:
    run = Run(tmp_path, SAVING)
    run.wait_for("running_0", "running_1")
    os.killpg(run.launcher.pid, number)
    code, complaints = run.end(60)
    assert code == 0, "the processes ended well"
    assert f"{number.name}: the processes have 30 s to save and end" in complaints
    assert sorted(path.name for path in tmp_path.glob("saved_*")) == [f"saved_{rank}_{number:d}" for rank in range(2)]
    assert "failed" not in complaints
    run.expect_nobody()


def test_the_second_ctrl_c_ends_processes_that_do_not_listen(tmp_path: Path) -> None:
    run = Run(tmp_path, DEAF)
    run.wait_for("running_0", "running_1")
    run.ctrl_c()
    time.sleep(1)
    assert run.launcher.poll() is None, "the first one is a request"
    run.ctrl_c()
    code, _ = run.end(5)
    assert code == 128 + signal.SIGINT
    run.expect_nobody()


def test_after_the_grace_period_processes_are_ended(tmp_path: Path) -> None:
    run = Run(tmp_path, DEAF, "--grace_period", 1)
    run.wait_for("running_0", "running_1")
    started = time.monotonic()
    run.launcher.terminate()
    code, _ = run.end(10)
    assert code == 128 + signal.SIGTERM
    assert time.monotonic() - started > 0.9
    run.expect_nobody()


@pytest.mark.parametrize("script", [at_night(TRAINING), DEAF], ids=["training", "deaf"])
def test_nothing_outlives_a_launcher_that_is_killed(script: str, tmp_path: Path) -> None:
    run = Run(tmp_path, script)
    run.wait_for("running" if script is TRAINING else "running_1")
    assert len(run.left()) >= 4, "the launcher, its guard and the ranks"
    run.launcher.kill()
    run.launcher.communicate()
    run.expect_nobody()


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_ctrl_c_at_any_moment_leaves_nobody(moment: int, tmp_path: Path) -> None:
    delay = (moment + random.random()) * 8 / MOMENTS
    run = Run(tmp_path, TRAINING, COVERAGE_PROCESS_CONFIG="")  # whose start swallows any exception
    time.sleep(delay)
    run.ctrl_c()
    _, complaints = run.end(60)
    if delay > 0.5:  # earlier than that, Python itself is still starting
        assert str(COMMAND) not in complaints, "the launcher itself shows no traceback"
    run.expect_nobody(10)


def test_programs_that_a_rank_left_running_end_with_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, "import subprocess; subprocess.Popen(['sleep', '600'])")
    code, _ = run.end(30)
    assert code == 0
    run.expect_nobody()
