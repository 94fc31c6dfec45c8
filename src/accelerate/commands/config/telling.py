"""What the command says when something is wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


def print_error(sentence: str) -> None:
    """Print a sentence where errors go."""
    print(f"accelerate config: {sentence}", file=sys.stderr)


@contextmanager
def exit_on_errors() -> Iterator[None]:
    """Turn errors that a person can mend into a sentence and the exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        print_error(str(error))
        raise SystemExit(2) from error
