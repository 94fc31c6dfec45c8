"""The signals that ask a launcher to end, and who answers them at which time."""

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
"""The last two are unknown to Windows."""


Handler = Callable[[int, FrameType | None], object] | signal.Handlers | int | None


def set_handlers(handler: Handler) -> None:
    """Set who answers the signals; outside the main thread Python allows no change."""
    if threading.current_thread() is threading.main_thread():
        for number in TERMINATION_SIGNALS:
            signal.signal(number, handler)


@contextmanager
def handlers_restored() -> Iterator[None]:
    """Give the signals back, after the block, to whoever answered them before."""
    before = {number: signal.getsignal(number) for number in TERMINATION_SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, earlier in before.items():
                signal.signal(number, earlier)


@contextmanager
def handled_by(handler: Handler) -> Iterator[None]:
    """Let one function answer the signals inside the block."""
    with handlers_restored():
        set_handlers(handler)
        yield


def exit_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """End this process now: nobody was started yet. An exception could get lost inside `import torch`."""
    os._exit(128 + number)
