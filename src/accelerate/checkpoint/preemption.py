"""Being asked to leave: SIGTERM, or a file that somebody puts there."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

TRIGGER_FILE = "PREEMPT"
SECONDS_BETWEEN_LOOKS = 1.0


class Preemption:
    """Notice a request on this process; agreeing with the others is the caller's business."""

    def __init__(self, project_dir: str | None) -> None:
        self.reason: str | None = None
        self.trigger = Path(project_dir) / TRIGGER_FILE if project_dir is not None else None
        self._next_look = 0.0
        self._earlier: Any = None
        if threading.current_thread() is threading.main_thread():
            self._earlier = signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.reason = "SIGTERM"
        if callable(self._earlier):
            self._earlier(number, frame)

    def requested(self) -> str | None:
        """Return what asks this process to leave, or None."""
        if self.reason is None and self.trigger is not None and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + SECONDS_BETWEEN_LOOKS
            if self.trigger.exists():
                self.reason = f"the file {self.trigger}"
        return self.reason

    def answered(self) -> None:
        """Take the trigger file away, so that the next start is not asked to leave at once."""
        if self.trigger is not None and os.path.exists(self.trigger):
            self.trigger.unlink(missing_ok=True)
