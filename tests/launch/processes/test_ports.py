"""A run on one machine listens at the loopback address only, and goes on whatever strangers there say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import warm
from tests.clusters.machines import ACCELERATE, until
from tests.ranks.pool import free_port
from tests.strangers import beyond_loopback, listening, strangers
from tests.timing import limit

TRAINS = """
import os, sys, time
from pathlib import Path
import torch
from meshwright import Accelerator, debug_launcher, notebook_launcher

def train():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    steps = 0
    stop = torch.zeros(1)
    while accelerator.reduce(stop).item() == 0:
        accelerator.backward(model(torch.ones(1, 1)).sum())
        steps += 1
        if steps == 3:
            Path(f"trains_{accelerator.process_index}").touch()
        stop = torch.tensor([float(Path("enough").exists())])
        time.sleep(0.02)
    Path(f"ended_{accelerator.process_index}").touch()

if __name__ == "__main__":
    how = sys.argv[1]
    if how == "notebook":
        notebook_launcher(train, num_processes=2)
    elif how == "notebook again":
        notebook_launcher(train, num_processes=2, max_restarts=1)
    elif how == "debug":
        debug_launcher(train, num_processes=2)
    elif how == "debug a rank":
        debug_launcher(train, num_processes=2, debug_rank=0)
    else:
        train()
"""
LAUNCH = (*ACCELERATE, "launch", "--cpu", "--num_processes", "2")
COMMANDS = {
    "launch": LAUNCH,
    "launch again": (*LAUNCH, "--max_restarts", "1"),
    "launch c10d": (*LAUNCH, "--rdzv_backend", "c10d"),
    "launch at a port": (*LAUNCH, "--main_process_port"),
    **dict.fromkeys(("notebook", "notebook again", "debug", "debug a rank"), (sys.executable,)),
}


def start(how: str, folder: Path) -> list[subprocess.Popen[bytes]]:
    """Start a run, whose log is `log`, in a folder."""
    (folder / "train.py").write_text(TRAINS)
    command = [*COMMANDS[how], *([str(free_port())] if how == "launch at a port" else ()), "train.py", how]
    base = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    base |= {"OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        return [warm.Popen(command, cwd=folder, env=base, stdout=log, stderr=subprocess.STDOUT)]


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("how", "connections"),
    [("launch", 100), *(pytest.param(how, 1000, marks=pytest.mark.nightly) for how in COMMANDS)],
)
def test_a_run_on_one_machine_listens_at_loopback_and_strangers_do_not_end_it(
    how: str, connections: int, tmp_path: Path
) -> None:
    processes = start(how, tmp_path)
    try:
        both = [tmp_path / f"trains_{rank}" for rank in range(2)]
        running = lambda: all(process.poll() is None for process in processes)  # noqa: E731
        until(lambda: all(file.exists() for file in both) or not running(), limit(120))
        assert all(file.exists() for file in both), (tmp_path / "log").read_text()
        places = [place for process in processes for place in listening(process.pid)]
        assert len(places) >= (2 if how == "debug a rank" else 3)  # of a store, and of gloo in each rank
        assert [beyond_loopback(process.pid) for process in processes] == [[] for _ in processes]
        with strangers(places, connections):
            (tmp_path / "enough").touch()
            codes = [process.wait(limit(60)) for process in processes]
        assert codes == [0 for _ in processes], (tmp_path / "log").read_text()
    finally:
        end(processes)
    assert all((tmp_path / f"ended_{rank}").exists() for rank in range(2))
