"""A process in the place of one that ended."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from ..verdict import Ending
from ..worker import ERROR_FILE

ERROR_FILE_NAME = "error.json"
SECONDS_TO_END = 5.0
_STREAMS = {"stdout": Std.OUT, "stderr": Std.ERR}


@dataclass(kw_only=True)
class LocalReplica:
    """A rank of this machine, whose process may be replaced."""

    rank: int
    folder: Path
    """Of its logs."""
    incarnation: int = 0
    """How many processes it had before the present one."""
    is_member: bool = True
    failures: int = 0
    """How many replacements in a row ended before they joined."""
    previous: Ending | None = None
    """How the process before the present one ended; None once this one has joined."""
    is_dismissed: bool = False
    """Its replacement has not joined and is not needed any more."""
    is_done: bool = False
    """Its process has ended with exit code 0."""

    @property
    def folder_now(self) -> Path:
        """The folder of the present process."""
        return self.folder / f"replacement_{self.incarnation}" if self.incarnation else self.folder

    def leave(self, ending: Ending) -> None:
        """Note that its process ended, and that another one takes its place."""
        self.incarnation += 1
        self.is_member = False
        self.previous = ending

    def join(self) -> None:
        """Note that its present process is a member."""
        self.is_member = True
        self.failures = 0
        self.previous = None


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Which output of a process goes to a file, and which of that is shown on the terminal."""

    redirects: Std
    tee: Std
    prefix: str


class Replacement:
    """A process in the place of one that ended; it has what torch's `SubprocessContext` expects of its handlers."""

    def __init__(
        self, local_rank: int, command: Sequence[str], variables: Mapping[str, str], folder: Path, streams: Streams
    ) -> None:
        folder.mkdir(parents=True)
        self.error_file = str(folder / ERROR_FILE_NAME)
        in_files = streams.redirects | streams.tee
        self._files: dict[str, IO[bytes]] = {
            name: open(folder / f"{name}.log", "wb")  # noqa: SIM115
            for name, stream in _STREAMS.items()
            if stream in in_files
        }
        self.proc = subprocess.Popen(
            command,
            env={**variables, ERROR_FILE: self.error_file},
            stdout=self._files.get("stdout"),
            stderr=self._files.get("stderr"),
            start_new_session=True,
        )
        shown = {"stdout": sys.stdout, "stderr": sys.stderr}
        self._tails = [
            TailLog("", {local_rank: str(folder / f"{name}.log")}, shown[name], {local_rank: streams.prefix}).start()
            for name in self._files
            if _STREAMS[name] in streams.tee
        ]

    def close(self, death_sig: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal to the process and those that it started."""
        end_group(self.proc.pid, death_sig)

    def release(self) -> None:
        """Close the files of a process that has ended, after all of its output was shown."""
        for tail in self._tails:
            tail.stop()
        for file in self._files.values():
            file.close()


def wait_for_end(processes: Iterable[int], seconds: float) -> None:
    """Wait until one of the child processes ends, for some seconds at most; where that cannot be awaited, sleep."""
    if not hasattr(os, "pidfd_open"):
        time.sleep(seconds)
        return
    handles = [os.pidfd_open(process) for process in processes]
    try:
        select.select(handles, [], [], seconds)
    finally:
        for handle in handles:
            os.close(handle)


def end_group(process_group: int, number: int | None = None) -> None:
    """Send a signal to a process group, if there is any process left in it; by default the one that kills."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process_group, signal.SIGKILL if number is None else number)


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, and what it has started: data workers hold memory and devices."""
    end_group(process.pid)
    with suppress(subprocess.TimeoutExpired):  # the kernel may keep it for a while, in a driver
        process.wait(SECONDS_TO_END)
