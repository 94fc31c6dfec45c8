"""Termination signals of a launcher, and their handlers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

TERMINATION_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)
)
"""Windows has no SIGHUP and no SIGQUIT."""


Handler = Callable[[int, FrameType | None], object] | signal.Handlers | int | None


def set_handlers(handler: Handler) -> None:
    """Set the handler of all termination signals; does nothing outside the main thread, where Python allows none."""
    if threading.current_thread() is threading.main_thread():
        for number in TERMINATION_SIGNALS:
            signal.signal(number, handler)


@contextmanager
def handlers_restored() -> Iterator[None]:
    """Restore the previous handlers after the block."""
    before = {number: signal.getsignal(number) for number in TERMINATION_SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, earlier in before.items():
                signal.signal(number, earlier)


@contextmanager
def handled_by(handler: Handler) -> Iterator[None]:
    """Handle the termination signals by one function inside the block."""
    with handlers_restored():
        set_handlers(handler)
        yield


def exit_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """Exit now: no process was started yet. `import torch` could swallow an exception."""
    os._exit(128 + number)
