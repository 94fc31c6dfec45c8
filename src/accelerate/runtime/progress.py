"""Progress on what takes long, without a dependency: a line on stderr after two seconds, from one process per host."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from .runtime import Runtime

T = TypeVar("T")
_QUIET_SECONDS = 2.0
_BETWEEN_SECONDS = 0.5
_WIDTH = 30


def progress(items: Sequence[T], description: str, unit: str = "steps") -> Iterator[T]:
    """Yield the items; once it takes longer than two seconds, show how far it is."""
    runtime = Runtime.existing()
    if not items or (runtime is not None and not runtime.is_local_main_process):
        yield from items
        return
    total = len(items)
    started = time.monotonic()
    shown_at = started + _QUIET_SECONDS - _BETWEEN_SECONDS
    shown = False
    for done, item in enumerate(items):
        yield item
        now = time.monotonic()
        if now - shown_at >= _BETWEEN_SECONDS:
            shown_at, shown = now, True
            _show(description, done + 1, total, now - started, unit)
    if shown:
        _show(description, total, total, time.monotonic() - started, unit)
        sys.stderr.write("\n")


def _show(description: str, done: int, total: int, seconds: float, unit: str) -> None:
    filled = _WIDTH * done // total
    left = seconds / done * (total - done)
    bar = "█" * filled + "░" * (_WIDTH - filled)
    sys.stderr.write(f"\r{description}  {bar} {done:,}/{total:,} {unit}, {left:.0f} s left ")
    sys.stderr.flush()
