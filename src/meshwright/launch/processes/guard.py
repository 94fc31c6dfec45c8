"""Terminate the processes of a launcher that has ended, however it ended.

Runs as a script, in a session of its own, so that neither Ctrl-C nor the launcher's end reaches it. It reads standard
input: every line is a process group to terminate, and end of file means that the launcher has ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable

SECONDS_TO_END = 5.0


class Guard:
    """The launcher's handle on the guard process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch_groups(self, process_groups: Iterable[int]) -> None:
        """Register process groups that must not outlive the launcher."""
        assert self._process.stdin is not None
        self._process.stdin.write("".join(f"{group}\n" for group in process_groups).encode())
        self._process.stdin.flush()


def end_groups(groups: set[int]) -> None:
    """Terminate process groups: SIGTERM first, SIGKILL for those that remain after some seconds."""
    deadline = time.monotonic() + SECONDS_TO_END
    _signal(groups, signal.SIGTERM)
    while groups and time.monotonic() < deadline:
        time.sleep(0.05)
        groups = {group for group in groups if _signal({group}, 0)}
    _signal(groups, signal.SIGKILL)


def _signal(groups: set[int], number: int) -> bool:
    reached = False
    for group in groups:
        try:
            os.killpg(group, number)
            reached = True
        except (ProcessLookupError, PermissionError):  # it ended, and its number may be reused
            pass
    return reached


if __name__ == "__main__":
    end_groups({int(line) for line in sys.stdin})
