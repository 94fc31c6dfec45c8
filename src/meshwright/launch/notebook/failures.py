"""The exception of a failed launch from Python. Imports torch, so it is loaded on failure only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

if TYPE_CHECKING:
    from ..processes.verdict import Ending


class WorkerFailedError(ChildFailedError, RuntimeError):
    """Report the worker whose failure ended the launch.

    `rank` says which, `reason` is its exception's type and message, `details` its traceback from the launched function
    on. `diagnosis` is what the watcher knows of a rank that waited in vain or lost its peer, or None. What torch
    saw of the workers is in `failures`, as with any `ChildFailedError`.
    """

    def __init__(self, rank: int, reason: str, details: str = "", *, diagnosis: str | None = None) -> None:
        self.rank = rank
        self.reason = reason
        self.details = details
        self.diagnosis = diagnosis
        text = (diagnosis or f"Rank {rank} failed with {reason}") + (f"\n\n{details}" if details else "")
        RuntimeError.__init__(self, text)
        self.name = "launched function"
        seen = ProcessFailure(local_rank=rank, pid=-1, exitcode=1, error_file="")
        seen.message = text
        self.failures = {rank: seen}


def reason_of_exit(ending: Ending) -> str:
    """Say how a worker ended that has left no exception."""
    if ending.signal_name is None:
        return f"exit code {ending.exit_code} and no exception"
    return ending.signal_name + (", as when memory runs out" if ending.signal_name == "SIGKILL" else "")
