"""Start a script as its user would: with python, torchrun or `meshwright launch`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil
import pytest

from tests import warm
from tests.ranks.pool import free_port

THROUGH = os.environ.get("MESHWRIGHT_TEST_DOOR", "")
"""How `run_script` starts: by `python -m meshwright` ("module"), by `meshwright launch` ("launch"), or as it would
without meshwright, where the drop-in distribution is installed ("dropin") or the tests' own environment is."""
PYTHON = os.environ.get("MESHWRIGHT_TEST_DOOR_PYTHON") or sys.executable

# One thread per process, because the tests share few cores. PYTHONUNBUFFERED would tear the lines of two ranks apart.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": ""}
if THROUGH:  # a process that waits with its imports done has imported the other accelerate, and no door opens then
    _ENVIRONMENT[warm.COLD] = "1"


def run_script(script: Path, *arguments: object, world_size: int, directory: Path, time_limit: float = 300.0) -> str:
    """Run a script in a directory until it ends, and return what it printed; fail the test unless it succeeds.

    One process is started by python alone, as on a laptop; more are started by torchrun. `.ci/nightly doors` starts
    both through each door.
    """
    if THROUGH == "launch":
        command = [PYTHON, "-m", "meshwright", "launch", "--cpu", "--num_processes", str(world_size)]
        command += ["--main_process_port", str(free_port())]
    else:
        command = [PYTHON, *(["-m", "meshwright"] if THROUGH == "module" else [])]
        if world_size > 1:
            command += ["-m", "torch.distributed.run", "--nproc_per_node", str(world_size)]
            command += ["--master_port", str(free_port())]
    command += [str(script), *map(str, arguments)]
    return run_to_success(
        command, script.name, directory=directory, env=os.environ | _ENVIRONMENT, time_limit=time_limit
    )


def run_to_success(
    command: Sequence[str], name: str, *, directory: Path, env: Mapping[str, str], time_limit: float
) -> str:
    """Run a command until it ends, and return what it printed; fail the test unless it succeeds."""
    process = _start(command, directory, env)
    printed, complaints = _finish(process, name, time_limit)
    if process.returncode != 0:
        pytest.fail(f"{name} ended with {process.returncode}.\n{printed[-4000:]}\n{complaints[-8000:]}")
    return printed


def _start(command: Sequence[str], directory: Path, env: Mapping[str, str]) -> subprocess.Popen[str]:
    return warm.Popen(
        command,
        cwd=directory,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that the processes it starts can be ended with it
    )


def _finish(process: subprocess.Popen[str], name: str, time_limit: float) -> tuple[str, str]:
    """Return what a process printed and complained of; fail the test if it does not end in time."""
    try:
        return process.communicate(timeout=time_limit)
    except subprocess.TimeoutExpired:
        left = end_tree(process.pid) + end_holders(process.stdout, process.stderr)
        printed, complaints = process.communicate()
        pytest.fail(f"{name} did not end within {time_limit:.0f} s.\n{left}\n{printed[-4000:]}\n{complaints[-4000:]}")


def end_tree(pid: int) -> str:
    """End a process and all that it started, in whatever session, and return who was still there."""
    root = psutil.Process(pid)
    left = []
    for one in [root, *root.children(recursive=True)]:  # a launcher that has ended is a zombie without children
        with suppress(psutil.NoSuchProcess):  # it ended this moment
            left.append(f"{one.pid} of {one.ppid()} {one.status()} {one.cmdline()}")
            one.kill()
    return "still there:\n" + "\n".join(left)


def end_holders(*pipes: IO[str] | None) -> str:
    """End the processes that keep pipes open which we read, because their end is awaited; return who they were."""
    wanted = {os.readlink(f"/proc/self/fd/{pipe.fileno()}") for pipe in pipes if pipe is not None}
    held = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):  # it ended this moment
            folder = Path(f"/proc/{process.pid}/fd")
            if process.pid != os.getpid() and wanted & {os.readlink(link) for link in folder.iterdir()}:
                held.append(f"{process.pid} of {process.ppid()} {process.status()} {process.cmdline()}")
                process.kill()
    return "\nits output was kept open by:\n" + "\n".join(held)


COMMAND = Path(PYTHON).with_name("meshwright")


@dataclass(frozen=True, kw_only=True)
class Launched:
    """What a command left behind."""

    code: int
    printed: str
    complaints: str
    seconds: float

    @property
    def panel(self) -> str:
        """The verdict, which must be the last thing printed."""
        _, rule, panel = self.complaints.partition("── the run failed")
        assert rule, f"no verdict was printed (exit code {self.code}):\n{self.complaints[-4000:]}"
        assert panel.rstrip().endswith("─"), f"something was printed after the verdict:\n{panel}"
        return panel


def environment(directory: Path, **variables: str) -> dict[str, str]:
    """Return the tests' environment, with a configuration folder of its own."""
    return os.environ | _ENVIRONMENT | {"HF_HOME": str(directory / "hf_home")} | variables


def start_accelerate(*words: object, directory: Path, **variables: str) -> subprocess.Popen[str]:
    """Start the `accelerate` command and return its process."""
    return _start([str(COMMAND), *map(str, words)], directory, environment(directory, **variables))


def run_accelerate(*words: object, directory: Path, time_limit: float = 300.0, **variables: str) -> Launched:
    """Run the `accelerate` command until it ends, however it ends."""
    started = time.monotonic()
    process = start_accelerate(*words, directory=directory, **variables)
    printed, complaints = _finish(process, f"accelerate {' '.join(map(str, words))}", time_limit)
    return Launched(code=process.returncode, printed=printed, complaints=complaints, seconds=time.monotonic() - started)
