"""Measure the training thread: how long each phase of a step takes on this process.

It is enabled only where the times are read (`clock`); elsewhere a phase change costs one check of a global. Times are
the host's, or the device's: see `watch/stragglers/device_clock.py`.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter
from typing import Any, Protocol, TypeVar, cast

from ..instruments import PROCESS, Instrument

DATA, FORWARD, BACKWARD, STEP, SAVING, WAITING, OTHER = range(7)
NAMES = ("data", "forward", "backward", "step", "saving", "waiting", "other")
"""`forward` is everything between a batch and the backward pass; `waiting` is collectives outside of the passes."""
_MOST_ROWS = 8192

Row = tuple[int, list[float]]
"""The number of a step, and its seconds per phase."""
F = TypeVar("F", bound=Callable[..., Any])


class PhaseClock(Instrument):
    """Measure the phases of one thread.

    A step ends when the loop requests the first batch after an optimizer step, however many optimizers there are.
    Without an optimizer every batch is a step; without a prepared loader every step of an optimizer is one.
    """

    __slots__ = (
        "_enclosing",
        "_has_loader",
        "_has_optimizer",
        "_phase",
        "_seconds",
        "_since",
        "_stepped",
        "copies",
        "extra_values",
        "rows",
        "steps",
        "thread",
        "trained",
    )

    def __init__(self) -> None:
        self.thread = get_ident()
        self.steps = 0
        self.rows: deque[Row] = deque(maxlen=_MOST_ROWS)
        """Steps that have not been read yet; a reader in another thread pops them from the left."""
        self.copies: deque[Row] | None = None
        """The same steps, for a second reader: the meter."""
        self.trained = 0
        """Changes whenever a backward pass or a step of an optimizer begins."""
        self.extra_values: dict[str, Any] | None = None
        """Values for the tracker to add to the next ones it logs, set by a reader."""
        self._seconds = [0.0] * len(NAMES)
        self._enclosing: list[int] = []
        self._phase, self._since = OTHER, perf_counter()
        self._has_loader = self._stepped = self._has_optimizer = False

    def enter(self, phase: int) -> int:
        """Enter a phase, and return the previous one."""
        now = perf_counter()
        before = self._phase
        self._seconds[before] += now - self._since
        self._since = now
        self._phase = phase
        if BACKWARD <= phase <= STEP:
            self.trained += 1
        return before

    def leave_all(self) -> None:
        """Leave all phases: what was inside of them has ended."""
        self._enclosing.clear()
        self.enter(OTHER)

    def skip(self) -> None:
        """Leave out the time since the last change of phase: the loop was not training."""
        self._since = perf_counter()

    def forget(self) -> None:
        """Leave out all that was measured since the last step ended: it was an evaluation."""
        self._seconds = [0.0] * len(NAMES)
        self._since = perf_counter()

    def end_completed_step(self) -> bool:
        """End a step whose optimizer has stepped, before the next batch is requested; return whether there is one."""
        if not (self._stepped and self._has_loader):
            return False
        self.enter(OTHER)
        self._end_step()
        return True

    def restart(self) -> None:
        """Count steps from 0 again, and forget those that were not read; called by the reader."""
        self.steps = 0
        self.rows.clear()

    def collect(self) -> deque[Row]:
        """Return the steps that have not been read yet, for the reader to pop."""
        return self.rows

    def optimizer_stepped(self) -> None:
        """End the phase of the optimizer's step."""
        self.enter(OTHER)
        self._stepped = self._has_optimizer = True
        if not self._has_loader:
            self._end_step()

    # --- as an instrument -------------------------------------------------------------------------------------------

    def epoch_started(self, loader: Any) -> None:
        """Wait for the first batch; this counts as the loader's phase."""
        if get_ident() == self.thread:
            self._request_batch(loader.phase)

    def body_started(self, loader: Any, batch: Any) -> None:
        """Compute with a batch."""
        if get_ident() == self.thread:
            self.enter(FORWARD)

    body_ended = epoch_started

    def epoch_ended(self, loader: Any, completed: bool) -> None:
        """Do something else, unless the loop was left early."""
        if completed and get_ident() == self.thread:
            self.enter(OTHER)

    def backward_started(self, accelerator: Any, loss: Any) -> None:
        """Begin a backward pass."""
        self.enter(BACKWARD)

    def backward_ended(self, accelerator: Any, loss: Any) -> None:
        """End a backward pass."""
        self.enter(OTHER)

    def step_started(self, optimizer: Any) -> None:
        """Begin an optimizer's step."""
        self.enter(STEP)

    def step_ended(self, optimizer: Any, skipped: bool) -> None:
        """End an optimizer's step."""
        self.optimizer_stepped()

    def phase_started(self, phase: int) -> None:
        """Enter a phase inside of another one."""
        if get_ident() == self.thread:
            self._enclosing.append(self.enter(phase))

    def phase_ended(self, phase: int) -> None:
        """Return to the enclosing phase."""
        if get_ident() == self.thread and self._enclosing:
            self.enter(self._enclosing.pop())

    def _request_batch(self, phase: int) -> None:
        self.enter(phase)
        if self._stepped or (self._has_loader and not self._has_optimizer):
            self._end_step()
        self._has_loader = True

    def _keep(self, row: Row) -> None:
        self.rows.append(row)
        if self.copies is not None:
            self.copies.append(row)

    def _end_step(self) -> None:
        self._keep((self.steps, self._seconds))
        self._seconds = [0.0] * len(NAMES)
        self.steps += 1
        self._stepped = False


clock: PhaseClock | None = None
"""The clock of this process, while it is read: `start` sets it."""


def start(started: PhaseClock | None) -> None:
    """Let a clock measure this process, in place of an earlier one; None for no clock."""
    global clock
    if clock is not None:
        PROCESS.remove(clock)
    clock = started
    if started is not None:
        PROCESS.add(started)


def stop(stopped: PhaseClock | None) -> None:
    """Stop a clock, if it is still the one that measures."""
    if clock is stopped:
        start(None)


run_folder: str | None = None
"""The folder of the run that is being logged to files."""


class Published(Protocol):
    """What the ranks of a run tell each other about their throughput."""

    def row(self) -> bytes:
        """Return the numbers of this rank."""

    def take(self, rows: list[bytes]) -> None:
        """Take the numbers of all ranks."""

    def stop(self) -> None:
        """Stop measuring."""


meter: Published | None = None
"""The meter of this process; whoever exchanges the times of steps exchanges its numbers, too."""


@contextmanager
def during(phase: int) -> Iterator[None]:
    """Count the block as a phase, then return to the enclosing one."""
    for notify in PROCESS.phase_started:
        notify(phase)
    try:
        yield
    finally:
        for notify in PROCESS.phase_ended:
            notify(phase)


def waits_for_others(function: F) -> F:
    """Count the calls of a function as waiting: their duration says nothing about this process."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not PROCESS.phase_started:
            return function(*args, **kwargs)
        with during(WAITING):
            return function(*args, **kwargs)

    return cast(F, wrapper)
