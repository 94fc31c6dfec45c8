"""Append-only JSON lines: a tracker without an account, a server or a package. `meshwright report` plots them.

A run is a folder with `metrics.jsonl`, one record per line:

    {"start": {"time": ..., "project": ..., "run": ..., "processes": ..., "meshwright": ..., "torch": ...}}
    {"config": {...}}
    {"step": 12, "time": ..., "values": {"loss": 0.5, "note": "text", "bad": "NaN"}}
    {"checkpoint": {"time": ..., "id": "5f0c81d2"}}
    {"step": 12, "time": ..., "system": {"memory/host": 812345344}}
    {"time": ..., "lost": {"wandb": 12}}
    {"end": {"time": ...}}

A start that resumes a checkpoint has its id as `resumed`: readers discard the records after the line of that
checkpoint, because the run repeats them. A start with `taken_over` is no new start of the run: under `meshwright
launch --survive` another process became the main process. `lost` counts the records that a tracker of this run did not
store since the last `start`.

All waiting records are passed to the operating system in one write, so that a killed process loses no written record,
and a crash of the machine loses at most the last records, never the file.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psutil
import torch

from .. import __version__
from ..runtime import phases
from ..runtime.group.runtime import Runtime
from .general import GeneralTracker, on_main_process
from .values import StepCounter, plain

if TYPE_CHECKING:
    from .writer import LoggedRecord

FILE_NAME = "metrics.jsonl"
_SECONDS_BETWEEN_SAMPLES = 1.0
_SECONDS_TO_WRITE_A_LINE = 0.05
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


class JSONLTracker(GeneralTracker):
    """Write a run to `<logging_dir>/<project>/<run>/metrics.jsonl`.

    The run is named after the time it started, or by `init_kwargs={"jsonl": {"run": "baseline"}}`; a run that exists
    is continued, and so is the run of a checkpoint that was resumed.
    """

    name = "jsonl"
    requires_logging_directory = False
    takes_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] = "runs", run: str | None = None) -> None:
        super().__init__()
        self.run_name = run_name
        self.run = run or time.strftime("%Y-%m-%d_%H-%M-%S")
        self._folder = os.path.join(logging_dir, run_name)
        self._has_given_name = run is not None
        self._is_new = False
        self._file: int | None = None
        self._number = StepCounter()
        self._sampled_at = -math.inf
        self._process = psutil.Process()
        self._line_is_incomplete = False
        self.lost_records: Callable[[], dict[str, int]] = dict
        """Returns how many records each tracker of the run has lost; set by the run, and written to the file."""
        self._written_lost_records: dict[str, int] = {}

    @property
    def path(self) -> str:
        """The file that is written."""
        return os.path.join(self._folder, self.run, FILE_NAME)

    @property
    def tracker(self) -> str:
        """The file that is written."""
        return self.path

    @on_main_process
    def start(self) -> None:
        """Open the file; after an incomplete line of a crashed process, start a new line."""
        if not self._has_given_name:
            self.run = self.continued.get("run", self.run)
        self._number.next = self.next_step
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._is_new = os.fstat(self._file).st_size == 0
        if _ends_inside_a_line(self._file):
            os.write(self._file, b"\n")
        phases.run_folder = os.path.dirname(self.path)  # the watcher writes its lines about the ranks here
        runtime = Runtime.existing()
        if runtime is not None and runtime.member is not None:
            runtime.member.announce_folder(os.path.abspath(phases.run_folder))
        self._write(
            start={
                "time": time.time(),
                "project": self.run_name,
                "run": self.run,
                "processes": 1 if runtime is None else runtime.num_processes,
                "meshwright": __version__,
                "torch": torch.__version__,
                **self._facts_of_continued_run(),
            }
        )

    def _facts_of_continued_run(self) -> dict[str, Any]:
        if self.continued.get("run") != self.run:
            return {}
        mark = self.continued.get("mark")
        return {"taken_over": True} if mark is None else {"resumed": mark}

    def run_identity(self) -> dict[str, Any]:
        """Return the name of the run."""
        return {"run": self.run}

    @on_main_process
    def mark_checkpoint(self, mark: str) -> None:
        """Write a line that marks the position of a checkpoint among the records."""
        self._write(checkpoint={"time": time.time(), "id": mark})

    @on_main_process
    def discard(self) -> None:
        """Close the file, and delete it if this run has created it."""
        if self._is_new and self._file is not None:
            os.close(self._file)
            self._file = phases.run_folder = None
            with suppress(OSError):  # there may be other files in the folder
                os.unlink(self.path)
                os.rmdir(os.path.dirname(self.path))
        else:
            self.finish()

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the config as plain data."""
        self._write(config=plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write the values of one step, by default the step after the last."""
        step = self._number(step)
        self._write(step=step, time=time.time(), values=plain(values))
        self._sample(step)

    @on_main_process
    def log_all(self, records: deque[LoggedRecord]) -> None:
        """Write records with one system call, and remove the written ones from the queue."""
        number, lines = self._number.next, []
        for record in records:
            if record.mark:
                lines.append(_line({"checkpoint": {"time": record.time, "id": record.mark}}))
                continue
            step = number if record.step is None else record.step
            number = step + 1
            lines.append(_line({"step": step, "time": record.time, "values": plain(record.materialized())}))
        written, problem = self._append(b"".join(lines))
        for line in lines:
            written -= len(line)
            if written < 0:
                break
            record = records.popleft()
            if not record.mark:
                self._number(record.step)
        if problem is not None:
            raise problem
        self._sample(self._number.next - 1)

    def _sample(self, step: int) -> None:
        """Write, about once a second, the memory of the process and the number of lost records."""
        if time.monotonic() - self._sampled_at >= _SECONDS_BETWEEN_SAMPLES:
            self._sampled_at = time.monotonic()
            self._write(step=step, time=time.time(), system=self._memory())
            self._write_lost_records()

    def _write_lost_records(self) -> None:
        lost = self.lost_records()
        if lost != self._written_lost_records:
            self._write(time=time.time(), lost=lost)
            self._written_lost_records = lost

    @on_main_process
    def finish(self) -> None:
        """Write the end of the run, and close the file."""
        if self._file is not None:
            self._write_lost_records()
            self._write(end={"time": time.time()})
            self.hand_over()

    @on_main_process
    def hand_over(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.fsync(self._file)
            os.close(self._file)
            self._file = phases.run_folder = None

    def _memory(self) -> dict[str, int]:
        host = {"memory/host": self._process.memory_info().rss}
        return host | ({"memory/device": _device_memory()} if torch.accelerator.is_available() else {})

    def _write(self, **record: Any) -> None:
        _, problem = self._append(_line(record))
        if problem is not None:
            raise problem

    def _append(self, lines: bytes) -> tuple[int, OSError | None]:
        """Write, and return the number of bytes written and the error, if any: a full disk may accept a part."""
        if self._file is None:
            raise ValueError(f"{self.path} is not open: call start() first.")
        done = 0
        try:
            if self._line_is_incomplete:
                os.write(self._file, b"\n")
                self._line_is_incomplete = False
            while done < len(lines):
                done += os.write(self._file, lines[done:])
                self._line_is_incomplete = lines[done - 1 : done] != b"\n"
        except OSError as error:
            return done, error
        return done, None


def _device_memory() -> int:
    return int(getattr(torch.accelerator, "memory_allocated", lambda: 0)())


def _ends_inside_a_line(file: int) -> bool:
    """Return whether the last line is incomplete, and no other process is writing it."""
    seen = -1
    while (size := os.fstat(file).st_size) and os.pread(file, 1, size - 1) != b"\n":
        if size == seen:
            return True
        seen = size
        time.sleep(_SECONDS_TO_WRITE_A_LINE)
    return False


def _line(record: dict[str, Any]) -> bytes:
    try:
        text = _encode(record)
    except ValueError:  # NaN or infinity, which JSON does not have
        text = _encode(_with_spelled_floats(record))
    return (text + "\n").encode()


def _with_spelled_floats(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _with_spelled_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_spelled_floats(item) for item in value]
    return value
