"""What a run leaves behind. In a dry run the script runs, and leaves nothing.

[Note: dry runs] A trial of a batch size and a plan run a script, or a part of it, without being the run: no file is
written, nothing is logged, no run of a tracker begins or ends. The methods of `Accelerator` that do such things say so
by `effect`, and say what they return in a dry run. It is one of the process: a script may have several Accelerators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])
_dry_runs = 0


def begin_dry_run() -> None:
    """Leave nothing behind until this process ends."""
    global _dry_runs
    _dry_runs += 1


@contextmanager
def dry_run() -> Iterator[None]:
    """Leave nothing behind meanwhile: methods that are marked as effects return what they would, and do nothing."""
    global _dry_runs
    begin_dry_run()
    try:
        yield
    finally:
        _dry_runs -= 1


def effect(*, instead: Callable[..., Any] = lambda *args, **kwargs: None) -> Callable[[Method], Method]:
    """Mark a method that leaves something behind; `instead` is called in a dry run, with the same arguments."""

    def marked(method: Method) -> Method:
        @wraps(method)
        def called(*args: Any, **kwargs: Any) -> Any:
            return instead(*args, **kwargs) if _dry_runs else method(*args, **kwargs)

        return cast("Method", called)

    return marked
