"""Preemption requests: SIGTERM, or a trigger file in the project folder."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

TRIGGER_FILE = "PREEMPT"
SECONDS_BETWEEN_CHECKS = 1.0


class Preemption:
    """Detect a preemption request on this process. The caller agrees on it with the other ranks."""

    def __init__(self, project_dir: str | None) -> None:
        self.reason: str | None = None
        self.trigger = Path(project_dir) / TRIGGER_FILE if project_dir is not None else None
        self._next_check = 0.0
        self._previous_handler: Any = None
        if threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.reason = "SIGTERM"
        if callable(self._previous_handler):
            self._previous_handler(number, frame)

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
