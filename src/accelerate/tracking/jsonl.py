"""Append-only JSON lines: a tracker without an account, a server or a package. `accelerate report` draws them.

A run is a folder with `metrics.jsonl`, one record per line:

    {"start": {"time": ..., "project": ..., "run": ..., "processes": ..., "accelerate": ..., "torch": ...}}
    {"config": {...}}
    {"step": 12, "time": ..., "values": {"loss": 0.5, "note": "text", "bad": "NaN"}}
    {"step": 12, "time": ..., "system": {"memory/host": 812345344}}
    {"end": {"time": ...}}

A record reaches the operating system in one write, so that a killed process loses nothing and a crash of the machine
at most the last records, never the file.
"""

from __future__ import annotations

import json
import math
import os
import time
from typing import Any

import psutil
import torch

from .. import __version__
from ..runtime import phases
from ..runtime.runtime import Runtime
from .general import GeneralTracker, on_main_process
from .values import StepCounter, plain

FILE_NAME = "metrics.jsonl"
_SECONDS_BETWEEN_SAMPLES = 1.0


class JSONLTracker(GeneralTracker):
    """Write a run to `<logging_dir>/<project>/<run>/metrics.jsonl`.

    The run is named after the time it started, or by `init_kwargs={"jsonl": {"run": "baseline"}}`; a run that exists
    is continued.
    """

    name = "jsonl"
    requires_logging_directory = False
    takes_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] = "runs", run: str | None = None) -> None:
        super().__init__()
        self.run_name = run_name
        self.run = run or time.strftime("%Y-%m-%d_%H-%M-%S")
        self.path = os.path.join(logging_dir, run_name, self.run, FILE_NAME)
        self._file: int | None = None
        self._number = StepCounter()
        self._sampled_at = -math.inf
        self._process = psutil.Process()

    @property
    def tracker(self) -> str:
        """The file that is written."""
        return self.path

    @on_main_process
    def start(self) -> None:
        """Open the file; behind a line that a crash cut off, a new one is begun."""
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")
        phases.run_folder = os.path.dirname(self.path)  # where the watcher's lines about the ranks go
        runtime = Runtime.existing()
        self._write(
            start={
                "time": time.time(),
                "project": self.run_name,
                "run": self.run,
                "processes": 1 if runtime is None else runtime.num_processes,
                "accelerate": __version__,
                "torch": torch.__version__,
            }
        )

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the config, whatever it is made of."""
        self._write(config=plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write the values of one step; without one, the step after the last."""
        step = self._number(step)
        self._write(step=step, time=time.time(), values=plain(values))
        if time.monotonic() - self._sampled_at >= _SECONDS_BETWEEN_SAMPLES:
            self._sampled_at = time.monotonic()
            self._write(step=step, time=time.time(), system=self._memory())

    @on_main_process
    def finish(self) -> None:
        """Write that the run ended, and close the file."""
        if self._file is not None:
            self._write(end={"time": time.time()})
            os.fsync(self._file)
            os.close(self._file)
            self._file = None
            phases.run_folder = None

    def _memory(self) -> dict[str, int]:
        host = {"memory/host": self._process.memory_info().rss}
        return host | ({"memory/device": _device_memory()} if torch.accelerator.is_available() else {})

    def _write(self, **record: Any) -> None:
        if self._file is None:
            raise ValueError(f"{self.path} is not open: call start() first.")
        line = (json.dumps(_strict(record), ensure_ascii=False, allow_nan=False) + "\n").encode()
        written = os.write(self._file, line)
        if written < len(line):  # a full disk can take a part; the rest raises what is wrong
            os.write(self._file, line[written:])


def _device_memory() -> int:
    return int(getattr(torch.accelerator, "memory_allocated", lambda: 0)())


def _strict(value: Any) -> Any:
    """Spell what JSON has no numbers for."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strict(item) for item in value]
    return value
