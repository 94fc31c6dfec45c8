"""Start a script as its user would: with python, or with torchrun on several processes of this host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.pool import free_port

# One thread per process, because the tests share few cores. PYTHONUNBUFFERED would tear the lines of two ranks apart.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": ""}


def run_script(script: Path, *arguments: object, world_size: int, directory: Path, time_limit: float = 100.0) -> str:
    """Run a script in a directory until it ends, and return what it printed; fail the test unless it succeeds.

    One process is started by python alone, as on a laptop; more are started by torchrun.
    """
    command = [sys.executable]
    if world_size > 1:
        command += ["-m", "torch.distributed.run", "--nproc_per_node", str(world_size)]
        command += ["--master_port", str(free_port())]
    command += [str(script), *map(str, arguments)]
    process = subprocess.Popen(
        command,
        cwd=directory,
        env=os.environ | _ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that torchrun's workers can be ended with it
    )
    try:
        printed, complaints = process.communicate(timeout=time_limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, complaints = process.communicate()
        pytest.fail(f"{script.name} did not end within {time_limit:.0f} s.\n{printed}\n{complaints[-4000:]}")
    if process.returncode != 0:
        pytest.fail(f"{script.name} ended with {process.returncode}.\n{printed}\n{complaints[-4000:]}")
    return printed
