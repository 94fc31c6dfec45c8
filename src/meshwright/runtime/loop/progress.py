"""Progress of slow operations, without a dependency: a line on stderr after two seconds, on one process per host."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from ..group.runtime import Runtime

T = TypeVar("T")
_QUIET_SECONDS = 2.0
_BETWEEN_SECONDS = 0.5
_BETWEEN_SECONDS_IN_A_FILE = 10.0
_WIDTH = 30


class _StatusLine:
    """A status line that is overwritten in a terminal, and repeated periodically in a log file."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.in_place = sys.stderr.isatty()
        self._between = _BETWEEN_SECONDS if self.in_place else _BETWEEN_SECONDS_IN_A_FILE
        self._shown_at: float | None = None
        self._length = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def is_due(self) -> bool:
        now = time.monotonic()
        if self._shown_at is None:
            return now - self.started >= _QUIET_SECONDS
        return now - self._shown_at >= self._between

    def show(self, text: str) -> None:
        self._shown_at = time.monotonic()
        sys.stderr.write(f"\r{text:<{self._length}}" if self.in_place else f"{text}\n")
        sys.stderr.flush()
        self._length = len(text)

    def end(self, text: str) -> None:
        """Show the last state, if anything was shown at all."""
        if self._shown_at is not None:
            self.show(text)
            if self.in_place:
                sys.stderr.write("\n")


def _is_silent() -> bool:
    runtime = Runtime.existing()
    return runtime is not None and not runtime.is_local_main_process


def progress(items: Sequence[T], description: str, unit: str = "steps") -> Iterator[T]:
    """Yield the items; after two seconds, show the progress."""
    if not items or _is_silent():
        yield from items
        return
    line, total = _StatusLine(), len(items)
    for done, item in enumerate(items, start=1):
        yield item
        if line.is_due():
            line.show(_bar(description, done, total, line.seconds, unit))
    line.end(_bar(description, total, total, line.seconds, unit))


def _bar(description: str, done: int, total: int, seconds: float, unit: str) -> str:
    filled = _WIDTH * done // total
    bar = "█" * filled + "░" * (_WIDTH - filled)
    when = f"{seconds / done * (total - done):.0f} s left" if done < total else f"{seconds:.0f} s"
    return f"{description}  {bar} {done:,}/{total:,} {unit}, {when}"


@contextmanager
def while_slow(describe: Callable[[], str]) -> Iterator[None]:
    """Run the block; after two seconds, show its description and the elapsed time."""
    if _is_silent():
        yield
        return
    ended = threading.Event()
    line, text = _StatusLine(), ""

    def update() -> None:
        nonlocal text
        pause = _QUIET_SECONDS
        while not ended.wait(pause):
            pause = _BETWEEN_SECONDS
            if line.is_due():
                text = describe()
                line.show(f"{text}, {line.seconds:.0f} s")

    thread = threading.Thread(target=update, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        line.end(f"{text}, {line.seconds:.0f} s: done")
