"""The launcher's own voice, and the silence of others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


def notify(sentence: str) -> None:
    """Print a line of the launcher's own."""
    print(f"accelerate launch: {sentence}", file=sys.stderr, flush=True)


@contextmanager
def loggers_silenced(*names: str) -> Iterator[None]:
    """Keep loggers quiet about failures that are reported better elsewhere."""
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
