"""A Python function for worker processes: how it is sent, run, and how its result returns."""

from __future__ import annotations

import atexit
import json
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from string import Template
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ...config.environment import export_settings, patch_environment, read
from ...errors import RuntimeConflictError
from ...runtime.process import ProcessInfo
from ...untrusted import parse_object
from ..processes.signals import set_handlers
from ..processes.worker import DIAGNOSIS, error_record

if TYPE_CHECKING:
    from ..processes.verdict import Verdict
    from .failures import WorkerFailedError


@dataclass(frozen=True, kw_only=True)
class NotebookTask:
    """A function, its arguments, and the directory to which workers write the result or their failures.

    A forked worker shares the notebook's memory and returns plain pickle, so that a class of the notebook stays the
    same class. A spawned worker has no such memory: cloudpickle sends the code itself, in both directions.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    directory: Path
    start_method: str
    line_prefix: str | None = None

    @property
    def forked(self) -> bool:
        """Whether workers start with a copy of this process's memory."""
        return self.start_method == "fork"

    def __reduce__(self) -> tuple[Any, ...]:
        payload = import_module("cloudpickle").dumps((self.function, self.args))
        return _task_from_pickle, (payload, self.directory, self.start_method, self.line_prefix)

    def run(self) -> None:
        """Run the function in a worker; write rank 0's result, or this rank's failure."""
        import torch

        if self.forked:
            atexit._clear()  # the parent's hooks delete its temporary folders, and the watcher may run them
        here = ProcessInfo.from_environment()
        _buffer_lines(self._line_prefix_of(here))
        if self.forked or read("OMP_NUM_THREADS") is None:
            torch.set_num_threads(1)  # OpenMP's threads did not survive the fork; and N workers share the cores
        # The watcher calls it with the error of a thread that hangs. The launcher shows the error.
        sys.excepthook = lambda kind, error, trace: self._write_failure(here.rank, error)
        try:
            with patch_environment(**export_settings({"fork_launched": self.forked or None})):
                result = self._call()
            if here.rank == 0:
                (self.directory / "result").write_bytes(self._serialized(result))
        except (Exception, SystemExit) as error:
            self._write_failure(here.rank, error)
            if isinstance(error, Exception):
                attach_diagnosis(error)
            if hasattr(error, DIAGNOSIS):
                self._write_failure(here.rank, error)
            raise
        leave_process_group()

    def _line_prefix_of(self, here: ProcessInfo) -> str | None:
        if self.line_prefix is None:
            return None
        return Template(self.line_prefix).safe_substitute(
            role_name=read("ROLE_NAME") or "", rank=here.rank, local_rank=here.local_rank
        )

    def _call(self) -> Any:
        try:
            return self.function(*self.args)
        except SystemExit as ending:
            if ending.code not in (None, 0):
                raise
            return None

    def _serialized(self, result: Any) -> bytes:
        try:
            return bytes((pickle if self.forked else import_module("cloudpickle")).dumps(result))
        except Exception as error:
            raise TypeError(
                f"the function's result, of type {type(result).__qualname__}, cannot be sent back to the notebook "
                f"({error}): return numbers, tensors or a state_dict, or save it to a file."
            ) from error

    def _write_failure(self, rank: int, error: BaseException) -> None:
        attempt = int(read("TORCHELASTIC_RESTART_COUNT") or 0)
        trace = error.__traceback__
        while trace is not None and Path(trace.tb_frame.f_code.co_filename).parent == Path(__file__).parent:
            trace = trace.tb_next  # the traceback begins at the launched function
        failure = {
            "attempt": attempt,
            "rank": rank,
            "record": error_record(error),
            "details": "".join(traceback.format_exception(type(error), error, _without_watcher_frames(trace))).strip(),
        }
        draft = self.directory / f"{attempt}-{rank}.draft"
        draft.write_text(json.dumps(failure))
        draft.rename(draft.with_suffix(".failure"))  # atomic: the launcher may be ending this worker

    def result(self) -> Any:
        """Return what rank 0 returned; None on a host that does not run rank 0."""
        path = self.directory / "result"
        return pickle.loads(path.read_bytes()) if path.exists() else None

    def failure(
        self, seen: Mapping[int, int] | None = None, *, unseen: Mapping[int, int] | None = None
    ) -> WorkerFailedError | None:
        """Return the failure that ended the last attempt: the others are its consequences.

        `seen` has exit codes that torch reported, by rank: a worker that was killed has written no failure. Those of
        `unseen` count only where no known failure is a cause, because torch kills workers too. None is returned where
        nothing is known.
        """
        left = [parse_object(path.read_text(), path.name) for path in self.directory.glob("*.failure")]
        last = max((failure["attempt"] for failure in left), default=0)
        failures = {failure["rank"]: failure for failure in left if failure["attempt"] == last}
        codes = {**(seen or {}), **dict.fromkeys(failures, 1)}
        if not codes:
            return None
        from ..processes.verdict import Ending, judge
        from .failures import WorkerFailedError, reason_of_exit

        def verdict_on(codes: Mapping[int, int]) -> Verdict:
            endings = [
                Ending(rank=rank, local_rank=rank, exit_code=code, record=failures.get(rank, {}).get("record"))
                for rank, code in codes.items()
            ]
            return judge(endings, out_of_memory=False)

        verdict = verdict_on(codes)
        if verdict.elsewhere or verdict.culprit.diagnosis is not None:  # it waited for another rank
            verdict = verdict_on({**(unseen or {}), **codes})
        first = verdict.culprit
        if first.record is None:
            return WorkerFailedError(first.rank, reason_of_exit(first))
        return WorkerFailedError(
            first.rank, first.record["text"], failures[first.rank]["details"], diagnosis=first.diagnosis
        )


def attach_diagnosis(error: Exception) -> None:
    """Call `sys.excepthook`, where the watcher adds its diagnosis to the error of a lost connection."""
    sys.excepthook(type(error), error, error.__traceback__)


def leave_process_group() -> None:
    """Leave the process group as a script does at its end: torch lets no worker end before all of them are done.

    The watcher then reports to a rank that still waits for this one that it has left, and not that it is busy.
    """
    from ...runtime.group.runtime import Runtime

    running = Runtime.existing()
    if running is not None:
        running.leave_group(all_ranks=True)


def run_task(task: NotebookTask) -> None:
    """Run a task in a worker that torchelastic started."""
    interrupted = threading.Event()

    def interrupt(*_: Any) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    reset_signals(interrupt)
    task.run()
    if interrupted.is_set():
        raise KeyboardInterrupt  # the function has handled it, but its result is no longer needed


def run_task_on_xla(index: int, task: NotebookTask, expected: int | None) -> None:
    """Run a task in a process that torch_xla started for a device."""
    from ...runtime.devices import xla

    started = xla.world_size()
    if expected not in (None, started):
        raise RuntimeConflictError(
            f"notebook_launcher(num_processes={expected}): torch_xla has started {started} on "
            f"{xla.kind_of_hardware()}, one for every device. Leave num_processes out, or say {started}."
        )
    with patch_environment(RANK=index, WORLD_SIZE=started):
        task.run()  # in a thread, which cannot have signal handlers


def reset_signals(on_interrupt: Any) -> None:
    """Undo the launcher's handlers, which a fork inherits: SIGTERM has to end a worker inside a collective too."""
    set_handlers(signal.SIG_DFL)
    signal.signal(signal.SIGINT, on_interrupt)


def _buffer_lines(prefix: str | None) -> None:
    """Buffer output by line, so that lines of two ranks do not mix and none is lost when a process ends."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if prefix is None and hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, write_through=False)
        elif stream is not None:  # a notebook's stream forwards every piece of a line at once
            setattr(sys, name, _LineBuffer(stream, prefix or ""))


class _LineBuffer:
    """A stream that forwards whole lines."""

    def __init__(self, stream: Any, prefix: str) -> None:
        self._stream = stream
        self._prefix = prefix
        self._line = ""

    def write(self, text: str) -> int:
        """Buffer text; forward the complete lines."""
        *lines, self._line = (self._line + text).split("\n")
        if lines:
            self._stream.write("".join(f"{self._prefix}{line}\n" for line in lines))
            self._stream.flush()
        return len(text)

    def flush(self) -> None:
        """Forward an incomplete line too: a progress bar writes no newline."""
        if self._line:
            self._stream.write(self._prefix + self._line)
            self._line = ""
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _task_from_pickle(payload: bytes, directory: Path, start_method: str, line_prefix: str | None) -> NotebookTask:
    function, args = pickle.loads(payload)
    return NotebookTask(
        function=function, args=args, directory=directory, start_method=start_method, line_prefix=line_prefix
    )


def _without_watcher_frames(trace: TracebackType | None) -> TracebackType | None:
    """Drop the frames of the watcher, which wraps `sys.exit`."""
    watcher = Path(__file__).parents[2] / "watch" / "hangs"
    kept = []
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).parent != watcher:
            kept.append(trace)
        trace = trace.tb_next
    for each in reversed(kept):
        trace = TracebackType(trace, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return trace
