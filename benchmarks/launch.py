"""The command: how soon it answers, and what starting a script through it costs.

One process is held against `python`, several against `torchrun`. The script of one process imports torch and does
nothing, as the smallest training script would: on a file with nothing in it the difference is the start of a second
interpreter, which is shown without a target.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from .interleave import Comparison, summary

ROUNDS_PER_START = 25
SECONDS_TO_ANSWER = 0.2
COMMAND = Path(sys.executable).with_name("accelerate")


def run(rounds: int) -> list[Comparison]:
    """Measure the answers and the starts, in turn."""
    times = 3 + rounds // ROUNDS_PER_START
    with tempfile.TemporaryDirectory() as directory:
        nothing, torch_only = Path(directory) / "nothing.py", Path(directory) / "torch_only.py"
        nothing.write_text("")
        torch_only.write_text("import torch")
        starts: list[tuple[str, Sequence[object], Sequence[object], float | None]] = [
            (
                "launch 1 process / python, a script that imports torch",
                [sys.executable, torch_only],
                [COMMAND, "launch", torch_only],
                1.05,
            ),
            (
                "launch 2 processes / torchrun, an empty script",
                [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--nproc_per_node=2",
                    f"--master_port={_port()}",
                    nothing,
                ],
                [COMMAND, "launch", "--cpu", "--num_processes=2", nothing],
                1.0,
            ),
            (
                "launch 1 process / python, an empty script",
                [sys.executable, nothing],
                [COMMAND, "launch", nothing],
                None,
            ),
        ]
        rows = [_answer(words, times, directory) for words in (["--help"], ["launch", "--help"], ["config", "default"])]
        return rows + [_start(*start, times, directory) for start in starts]


def _answer(words: Sequence[str], times: int, directory: str) -> Comparison:
    costs = [(SECONDS_TO_ANSWER, _seconds([COMMAND, *words], directory)) for _ in range(times)]
    return summary(f"accelerate {' '.join(words)} / {SECONDS_TO_ANSWER} s", costs, target=1.0)


def _start(
    what: str, bare: Sequence[object], ours: Sequence[object], target: float | None, times: int, directory: str
) -> Comparison:
    _seconds(ours, directory)  # compiles what has not been compiled
    costs: list[tuple[float, float]] = []
    for turn in range(times):
        pair = [_seconds(side, directory) for side in ((bare, ours) if turn % 2 == 0 else (ours, bare))]
        costs.append((pair[0], pair[1]) if turn % 2 == 0 else (pair[1], pair[0]))
    return summary(what, costs, target)


def _seconds(command: Sequence[object], directory: str) -> float:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    started = time.perf_counter()
    subprocess.run(
        list(map(str, command)),
        env=environment | {"OMP_NUM_THREADS": "1", "HF_HOME": directory},
        check=True,
        capture_output=True,
    )
    return time.perf_counter() - started


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
