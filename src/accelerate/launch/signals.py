"""The signals that ask a launcher to end, and who answers them at which time."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


Handler = Callable[[int, FrameType | None], object] | signal.Handlers | int | None


def answer_with(handler: Handler) -> dict[int, Handler]:
    """Set who answers the signals, and return who did before; outside the main thread Python allows no change."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) for number in ENDING}


@contextmanager
def answered_by(handler: Handler) -> Iterator[None]:
    """Let one function answer the signals inside the block."""
    before = answer_with(handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def leave_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """End this process now: nobody was started yet. An exception could get lost inside `import torch`."""
    os._exit(128 + number)
