"""Print the launcher's messages, and silence loggers that would repeat them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..program import program_name


def notify(message: str) -> None:
    """Print a message of the launcher to stderr."""
    print(f"{program_name()} launch: {message}", file=sys.stderr, flush=True)


@contextmanager
def loggers_silenced(*names: str) -> Iterator[None]:
    """Silence loggers inside the block: what they report is reported elsewhere."""
    import logging  # not needed by a launch that goes well

    logs = [logging.getLogger(name) for name in names]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
