"""A clock of the training thread: which part of a step took how long on this process.

It runs only where somebody reads it (`clock`); elsewhere a phase change costs one look at a name. Times are the
host's: what a device does meanwhile shows where the thread waits for it.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, TypeVar, cast

DATA, FORWARD, BACKWARD, STEP, SAVING, WAITING, OTHER = range(7)
NAMES = ("data", "forward", "backward", "step", "saving", "waiting", "other")
"""`forward` is all between a batch and the backward pass, `waiting` are collectives outside of the passes."""
_MOST_ROWS = 8192

Row = tuple[int, list[float]]
"""The number of a step, and its seconds per phase."""
F = TypeVar("F", bound=Callable[..., Any])


class Phases:
    """The clock of one thread.

    A step ends when the loop asks for the first batch after an optimizer stepped, however many optimizers there are.
    Without an optimizer every batch is a step; without a prepared loader every step of an optimizer is one.
    """

    __slots__ = (
        "_fed",
        "_has_optimizer",
        "_phase",
        "_seconds",
        "_since",
        "_stepped",
        "news",
        "rows",
        "steps",
        "thread",
    )

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.steps = 0
        self.rows: deque[Row] = deque(maxlen=_MOST_ROWS)
        """Steps that nobody has read yet; a reader in another thread takes them from the left."""
        self.news: dict[str, Any] | None = None
        """What the next values that are logged should carry; left here by a reader."""
        self._seconds = [0.0] * len(NAMES)
        self._phase, self._since = OTHER, perf_counter()
        self._fed = self._stepped = self._has_optimizer = False

    def enter(self, phase: int) -> int:
        """Begin a phase, and return the one that ends."""
        now = perf_counter()
        before = self._phase
        self._seconds[before] += now - self._since
        self._since = now
        self._phase = phase
        return before

    def optimizer_stepped(self) -> None:
        """End the optimizer's phase."""
        self.enter(OTHER)
        self._stepped = self._has_optimizer = True
        if not self._fed:
            self._end_step()

    def feed(self, batches: Iterator[Any], phase: int) -> Iterator[Any]:
        """Hand batches on; the time in which the loop waits for one is of this phase."""
        if threading.get_ident() != self.thread:
            yield from batches
            return
        self._ask(phase)
        for batch in batches:
            self.enter(FORWARD)
            yield batch
            self._ask(phase)
        self.enter(OTHER)

    def _ask(self, phase: int) -> None:
        self.enter(phase)
        if self._stepped or (self._fed and not self._has_optimizer):
            self._end_step()
        self._fed = True

    def _end_step(self) -> None:
        self.rows.append((self.steps, self._seconds))
        self._seconds = [0.0] * len(NAMES)
        self.steps += 1
        self._stepped = False


clock: Phases | None = None
"""The clock of this process, while somebody reads it."""
run_folder: str | None = None
"""The folder of a run that is logged to files, while it is."""


@contextmanager
def during(phase: int) -> Iterator[None]:
    """Count the block as a phase, and go back to the one around it."""
    running = clock
    if running is None or running.thread != threading.get_ident():
        yield
        return
    before = running.enter(phase)
    try:
        yield
    finally:
        running.enter(before)


def waits_for_others(function: F) -> F:
    """Count the calls of a function as waiting: they say nothing about this process."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if clock is None:
            return function(*args, **kwargs)
        with during(WAITING):
            return function(*args, **kwargs)

    return cast(F, wrapper)
