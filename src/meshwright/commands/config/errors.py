"""Print the errors of `meshwright config`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ...program import program_name


def print_error(message: str) -> None:
    """Print a message to stderr."""
    print(f"{program_name()} config: {message}", file=sys.stderr)


@contextmanager
def exit_on_errors() -> Iterator[None]:
    """Print errors that a user can fix, and exit with code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        print_error(str(error))
        raise SystemExit(2) from error
