"""The command: how soon it answers, and what starting a script through it costs.

One process is held against `python`, several against `torchrun`. The script of one process imports torch and does
nothing, as the smallest training script would: on a file with nothing in it the difference is the start of a second
interpreter, which is shown without a target. Whoever starts another number of processes than was asked for fails.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .contenders import bare, current
from .interleave import Comparison

ROUNDS_PER_START = 25
SECONDS_TO_ANSWER = 0.2


def run(rounds: int) -> list[Comparison]:
    """Measure the answers and the starts, in turn."""
    times = 3 + rounds // ROUNDS_PER_START
    library = current()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        nothing, torch_only = folder / "nothing.py", folder / "torch_only.py"
        nothing.write_text("")
        torch_only.write_text("import torch")
        starts: list[tuple[str, Path, int, float | None]] = [
            ("launch 1 process / python, a script that imports torch", torch_only, 1, 1.05),
            ("launch 2 processes / torchrun, an empty script", nothing, 2, 1.0),
            ("launch 1 process / python, an empty script", nothing, 1, None),
        ]
        rows = [_answer(what, command, times, folder) for what, command in library.ANSWERS.items()]
        for what, script, processes, target in starts:
            command = library.launch(script, processes, folder)
            if command is not None:
                _check(library, processes, folder)
                costs = _starts(bare.launch(script, processes, folder), command, times, folder)
                rows.append(Comparison(what, costs, target))
        return rows


def _check(library: Any, processes: int, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as marks:
        script = folder / "mark.py"
        script.write_text(f"import os, pathlib\npathlib.Path({marks!r}, str(os.getpid())).touch()")
        _seconds(library.launch(script, processes, folder), folder)
        started = len(list(Path(marks).iterdir()))
        if started != processes:
            raise RuntimeError(f"asked for {processes} processes, it started {started}")


def _answer(what: str, command: Sequence[object], times: int, folder: Path) -> Comparison:
    costs = [(SECONDS_TO_ANSWER, _seconds(command, folder)) for _ in range(times)]
    return Comparison(f"{what} / {SECONDS_TO_ANSWER} s", costs, 1.0)


def _starts(bare: Sequence[object], ours: Sequence[object], times: int, folder: Path) -> list[tuple[float, float]]:
    _seconds(ours, folder)  # compiles what has not been compiled
    costs: list[tuple[float, float]] = []
    for turn in range(times):
        pair = [_seconds(side, folder) for side in ((bare, ours) if turn % 2 == 0 else (ours, bare))]
        costs.append((pair[0], pair[1]) if turn % 2 == 0 else (pair[1], pair[0]))
    return costs


def _seconds(command: Sequence[object], folder: Path) -> float:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    started = time.perf_counter()
    ran = subprocess.run(
        list(map(str, command)),
        env=environment | {"OMP_NUM_THREADS": "1", "HF_HOME": str(folder)},
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - started
    if ran.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {ran.returncode}: {ran.stderr}")
    return seconds
