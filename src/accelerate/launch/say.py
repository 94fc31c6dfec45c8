"""The launcher's own voice."""

from __future__ import annotations

import sys


def say(sentence: str) -> None:
    """Print a line of the launcher's own."""
    print(f"accelerate launch: {sentence}", file=sys.stderr, flush=True)
