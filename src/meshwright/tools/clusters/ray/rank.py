"""The actor of one rank. A function runs in the actor's own process; a script runs in a child of it."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ....config.environment import export, read
from ....launch.processes import worker
from ....launch.processes.guard import Guard
from ....launch.processes.verdict import Ending
from ....launch.processes.worker import CRASH_FILE_NAME, DIAGNOSIS, ERROR_FILE, LAUNCHER_PID, write_record
from ....runtime.group.network import get_free_port, interface_towards
from ....temporary import new_folder, remove_folder
from .placement import draining_nodes

SECONDS_BETWEEN_LOOKS_FOR_DRAINING = 2.0
_FATAL_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating-point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
"""How faulthandler names the signals that it reports. Not every system has them all."""


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """What an actor knows of its process."""

    pid: int
    free_port: int
    devices: tuple[str, ...]
    """The ids of its GPUs, as Ray assigned them."""
    error_file: str


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """How a rank ended, what its function returned, and the traceback of its exception."""

    ending: Ending
    result: Any = None
    details: str = ""


class RankActor:
    """One rank of the run. Ray calls its methods one after the other, in the main thread of a process of its own."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._folder = new_folder("ray")
        self._error_file = str(self._folder / "error.json")

    def __repr__(self) -> str:
        return f"rank {self._rank}"  # Ray puts it before each line of output

    def process(self) -> RankProcess:
        """Return what the launcher has to know of this process before the ranks begin."""
        import ray

        return RankProcess(
            pid=os.getpid(),
            free_port=get_free_port(),
            devices=tuple(map(str, ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))),
            error_file=self._error_file,
        )

    def run_function(self, variables: Mapping[str, str], work: tuple[Any, Sequence[Any]]) -> RankResult:
        """Run the function in this process."""
        self._export(variables)
        # Ray's handler raises SystemExit in the middle of a save after a preemption.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        threading.Thread(target=_await_draining, daemon=True).start()
        # Both stay for the case that the process ends here: the launcher then reads the files.
        faulthandler.enable(file=open(self._folder / CRASH_FILE_NAME, "w"))  # noqa: SIM115
        sys.excepthook = lambda kind, error, trace: write_record(error, self._error_file)
        function, args = work
        try:
            result = _call(function, args)
            if self._rank == 0:
                _check_result(result)
            answer = RankResult(ending=self._ending(0), result=result if self._rank == 0 else None)
        except BaseException as error:
            answer = self._failure(error)
        remove_folder(self._folder)
        return answer

    def run_script(self, variables: Mapping[str, str], words: Sequence[str], folder: str, python: bool) -> RankResult:
        """Run a script in a child, which ends with this process. The first SIGTERM is passed on, the second kills.

        The child's working directory is `folder`, where it exists on this node; `python` is this node's.
        """
        command = [sys.executable, worker.__file__, *words] if python else words
        self._export({**variables, LAUNCHER_PID: str(os.getpid())})
        guard = Guard()
        try:
            child = subprocess.Popen(command, cwd=folder if os.path.isdir(folder) else None, start_new_session=True)
        except OSError as error:  # a program that this node does not have
            return self._failure(error)
        guard.watch_groups([child.pid])
        sent: list[int] = []

        def forward(*_: Any) -> None:
            sent.append(signal.SIGKILL if sent else signal.SIGTERM)
            with suppress(ProcessLookupError):
                os.killpg(child.pid, sent[-1])

        signal.signal(signal.SIGTERM, forward)
        threading.Thread(target=_await_draining, daemon=True).start()
        ending = self._ending(child.wait())
        remove_folder(self._folder)
        return RankResult(ending=ending)

    def _export(self, variables: Mapping[str, str]) -> None:
        interface = None
        if variables["GROUP_WORLD_SIZE"] != "1" and not read("GLOO_SOCKET_IFNAME"):
            interface = interface_towards(variables["MASTER_ADDR"])
        network = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
        export({**variables, **network, ERROR_FILE: self._error_file})

    def _failure(self, error: BaseException) -> RankResult:
        """Record an exception as `worker.py` does for a script, with what the watcher knows of it."""
        from ....launch.notebook.task import attach_diagnosis

        write_record(error, self._error_file)
        if isinstance(error, Exception):
            attach_diagnosis(error)  # by the hook, which writes the record
        if hasattr(error, DIAGNOSIS):
            write_record(error, self._error_file)
        code = error.code if isinstance(error, SystemExit) else 1
        if isinstance(code, str):
            print(code, file=sys.stderr)
        details = traceback.format_exception(type(error), error, _without_own_frames(error))
        return RankResult(ending=self._ending(code if isinstance(code, int) else 1), details="".join(details).strip())

    def _ending(self, exit_code: int) -> Ending:
        return Ending.read(
            rank=self._rank, local_rank=0, exit_code=exit_code, error_file=self._error_file, ended_by_launcher=False
        )


def _call(function: Any, args: Sequence[Any]) -> Any:
    """Call the function as a script would run. No method: Ray puts a frame of its own around each."""
    from ....launch.notebook.task import leave_process_group

    try:
        result = function(*args)
    except SystemExit as ending:
        if ending.code not in (None, 0):
            raise
        result = None
    leave_process_group()
    return result


def _await_draining() -> None:
    """Send this process SIGTERM, which `save_if_preempted` takes as a request, when its node is to be taken away."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    while node not in draining_nodes():
        time.sleep(SECONDS_BETWEEN_LOOKS_FOR_DRAINING)
    os.kill(os.getpid(), signal.SIGTERM)


def _check_result(result: Any) -> None:
    from ray import cloudpickle

    try:
        cloudpickle.dumps(result)
    except Exception as error:
        raise TypeError(
            f"the function's result, of type {type(result).__qualname__}, cannot be sent to the driver ({error}): "
            "return numbers, tensors or a state_dict, or save it to a file."
        ) from error


def _without_own_frames(error: BaseException) -> Any:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


# --- tasks that the launcher runs on the node of a rank ---------------------------------------------------------------


def signal_processes(pids: Sequence[int], number: int) -> None:
    """Send a signal to processes of this node."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def read_ending(rank: int, error_file: str) -> Ending | None:
    """Read what a rank whose process is gone has written: an exception, or the stack of a fatal signal."""
    ending = Ending.read(rank=rank, local_rank=0, exit_code=1, error_file=error_file, ended_by_launcher=False)
    remove_folder(Path(error_file).parent)
    named = next(
        (signal_name for text, signal_name in _FATAL_SIGNALS.items() if f"error: {text}" in ending.crash), None
    )
    if named is not None:
        return replace(ending, exit_code=-signal.Signals[named])
    return ending if ending.record is not None else None
