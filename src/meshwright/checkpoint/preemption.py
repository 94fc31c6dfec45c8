"""Preemption requests: SIGTERM, or a trigger file in the project folder."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

TRIGGER_FILE = "PREEMPT"
SECONDS_BETWEEN_CHECKS = 1.0
MOST_CALLS_BETWEEN_CHECKS = 20
"""Steps may become slow after fast ones; so many of them, at most, pass before the ranks ask each other again."""


class Preemption:
    """Detect a preemption request on any rank.

    Asking the others blocks the host until they have come to the same step. The ranks therefore ask about once per
    second, at calls that they have agreed on by the measured time of a step.
    """

    def __init__(self, project_dir: str | None) -> None:
        self.reason: str | None = None
        self.trigger = Path(project_dir) / TRIGGER_FILE if project_dir is not None else None
        self._next_check = 0.0
        self._calls = self._calls_between_checks = 1
        self._last_agreement = time.monotonic()
        self._previous_handler: Any = None
        if threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.reason = "SIGTERM"
        if callable(self._previous_handler):
            self._previous_handler(number, frame)

    def agreed(
        self, gather: Callable[[tuple[str | None, float]], list[tuple[str | None, float]]], *, at_once: bool = False
    ) -> str | None:
        """Return what requests any rank to stop, or None; the same on all ranks, which call this equally often.

        `gather` returns the items of all ranks. It is called now and then, or in every call with `at_once`.
        """
        self._calls -= 1
        if self._calls > 0 and not at_once:
            return None
        answers = gather((self.requested(), time.monotonic() - self._last_agreement))
        self._last_agreement = time.monotonic()
        seconds = max(seconds for _, seconds in answers) / self._calls_between_checks
        wanted = int(SECONDS_BETWEEN_CHECKS / max(seconds, 1e-9))
        self._calls = self._calls_between_checks = min(max(wanted, 1), MOST_CALLS_BETWEEN_CHECKS)
        return next((reason for reason, _ in answers if reason is not None), None)

    def requested(self) -> str | None:
        """Return what requests this process to stop, or None."""
        if self.reason is None and self.trigger is not None and time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + SECONDS_BETWEEN_CHECKS
            if self.trigger.exists():
                self.reason = f"the file {self.trigger}"
        return self.reason

    def clear_trigger(self) -> None:
        """Delete the trigger file, so that the next start is not preempted at once."""
        if self.trigger is not None and os.path.exists(self.trigger):
            self.trigger.unlink(missing_ok=True)
