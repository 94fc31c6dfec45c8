"""Errors people meet. Each says what happened, on which rank, what was expected and what to do."""

from __future__ import annotations

from collections.abc import Sequence

START_ME_AGAIN = 75
"""The exit code of a run that saved because it was asked to leave: EX_TEMPFAIL of sysexits.h, which Slurm's
RequeueExit can name and `accelerate launch` hands on."""


class UnsupportedSettingError(ValueError):
    """Refuse a setting that this version accepts by name but cannot honour."""

    def __init__(self, setting: str, reason: str, remedy: str) -> None:
        self.setting = setting
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{setting} cannot be used: {reason} {remedy}")


class RuntimeConflictError(RuntimeError):
    """Refuse a setting that the process has already settled differently."""


class DistributedOperationException(RuntimeError):
    """Report ranks that entered one collective with different data.

    `per_rank[r]` describes what rank `r` brought.
    """

    def __init__(self, message: str, per_rank: Sequence[object] = ()) -> None:
        self.per_rank = list(per_rank)
        super().__init__(message)


class StuckError(RuntimeError):
    """Report ranks that wait for each other in vain: who is where, and which rule was broken."""


class LaunchError(RuntimeError):
    """Report a launch that cannot begin, before anything was started."""
