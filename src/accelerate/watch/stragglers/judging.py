"""Which rank is slow, in which phase, and what it costs the run: judged from the windows of all ranks.

Ranks that train together take the same time per step, because all wait for the slowest. So the whole step tells
nothing; the phases in which a rank does its own work do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...runtime import phases
from .. import place
from ..reports import listed
from .windows import FIELDS, KEPT, LENGTH, MEDIANS, NUMBER, SPREADS, WHOLE, Table

SHARE_OF_STEP = 0.05
SHARE_OF_PHASE = 0.15
LEAST_SECONDS = 0.001
"""Below that it is the operating system, and the steps are so short that nobody minds."""
CONSECUTIVE = 3
"""Windows in a row after which a rank is slow, or no longer."""
_WORSE = 1.5
_SPREAD_TO_ERROR = 1.86
"""From the median distance of single steps to the standard error of their median, times the root of their number."""
_WORDS = {
    phases.DATA: place.DATA,
    phases.STEP: place.STEP,
    phases.FORWARD: place.FORWARD,
    phases.OTHER: place.USERS,
}
_PURE = (phases.DATA, phases.STEP)

# [Note: who is blamed]
# A rank is compared with the median of the others, in the phases where it works for itself. The backward pass and
# collectives are waiting, and saving is the main process's work: nobody is blamed for those. A forward pass or the
# script's own code may hold collectives that nobody sees from outside (buffers, sharded parameters): there the ranks
# that wait for a slow one look slow themselves. Waiting for data and the optimizer's step hold none. So a rank that is
# slow in one of those explains what others spend in the passes.


@dataclass(frozen=True)
class Finding:
    """A rank that makes the others wait."""

    rank: int
    phase: int
    seconds: float
    usual: float
    """What the others need, as their median."""
    cost: float
    """The share of every step that the run would save."""
    also: tuple[int, ...] = ()
    """Other ranks that are slow in the same phase."""

    def __str__(self) -> str:
        also = f" {listed(self.also)} too." if self.also else ""
        return (
            f"Rank {self.rank} is slow in {_WORDS[self.phase]}: {_seconds(self.seconds)} per step, where the others "
            f"need {_seconds(self.usual)}. It costs the run {self.cost:.0%} of every step.{also}"
        )

    def over(self) -> str:
        """Say that it has ended."""
        return f"Rank {self.rank} is no longer slow in {_WORDS[self.phase]}."


@dataclass(frozen=True)
class Window:
    """The same steps on all ranks that took part in them."""

    ranks: list[int]
    rows: Table
    finding: Finding | None


class Judge:
    """Compare window after window, and remember who was slow."""

    def __init__(self) -> None:
        self.current: Finding | None = None
        self._judged = (0, -1)
        self._slow_for: dict[tuple[int, int], int] = {}
        self._absent_for = 0

    def lacks(self, window: Table) -> bool:
        """Return whether a window is still to be judged."""
        return bool(window[LENGTH]) and self._judged != (window[LENGTH], window[NUMBER])

    def hear(self, table: Table) -> Iterator[Window]:
        """Judge the windows that are new and complete; the first rank's own say which there are."""
        length = int(table[0, -1, LENGTH])
        if length and length != self._judged[0]:
            self._judged = length, -1
        valid = table[:, :, LENGTH] == length if length else np.zeros(table.shape[:2], dtype=bool)
        newest = np.where(valid, table[:, :, NUMBER], -1.0).max(axis=1)
        goes_on = newest >= newest[0] - KEPT
        for number in table[0, valid[0], NUMBER]:
            if number <= self._judged[1]:
                continue
            found = valid & (table[:, :, NUMBER] == number)
            here = found.any(axis=1)
            if (goes_on & (newest < number)).any():
                return  # a rank has not told yet
            self._judged = length, int(number)
            ranks = np.flatnonzero(here)
            rows = table[found].reshape(-1, FIELDS)
            self._remember(slow_ranks(ranks, rows))
            yield Window(ranks.tolist(), rows, self.current)

    def _remember(self, slow: list[Finding]) -> None:
        self._slow_for = {key: self._slow_for.get(key, 0) + 1 for key in ((found.rank, found.phase) for found in slow)}
        sure = [found for found in slow if self._slow_for[found.rank, found.phase] >= CONSECUTIVE]
        worst = max(sure, key=lambda found: found.cost, default=None)
        now, before = worst, self.current
        if before is not None:
            again = [found for found in slow if (found.rank, found.phase) == (before.rank, before.phase)]
            self._absent_for = 0 if again else self._absent_for + 1
            stays = again[0] if again else before if self._absent_for < CONSECUTIVE else None
            if stays is not None and (worst is None or worst.cost < _WORSE * stays.cost):
                now = stays  # of several that are as slow, always the same one is named
        self.current = now


def slow_ranks(ranks: np.ndarray, rows: Table) -> list[Finding]:
    """Return who is slow in one window. See [Note: who is blamed]."""
    if len(ranks) < 2:
        return []
    step, length = float(np.median(rows[:, WHOLE])), rows[0, LENGTH]
    medians, spreads = rows[:, MEDIANS], rows[:, SPREADS]
    # Of many ranks one is always far out by chance: the more there are, the farther it must be.
    sigmas = 2.5 + math.sqrt(2 * math.log(len(ranks)))
    found: list[Finding] = []
    for phase in _WORDS:
        seconds, spread = medians[:, phase], spreads[:, phase]
        usual = _median_of_others(seconds)
        excess = seconds - usual
        error = np.maximum(spread, np.median(spread)) * (_SPREAD_TO_ERROR / math.sqrt(length))
        slow = (excess >= max(SHARE_OF_STEP * step, LEAST_SECONDS)) & (excess >= SHARE_OF_PHASE * usual)
        slow &= excess >= sigmas * error
        if phase not in _PURE:
            slow &= ~_explained(excess, ranks, found, step)
        indices = np.flatnonzero(slow)
        for index in indices:
            also = tuple(int(ranks[other]) for other in indices if other != index)
            cost = float(excess[index]) / step
            found.append(Finding(int(ranks[index]), phase, float(seconds[index]), float(usual[index]), cost, also))
    return found


def _explained(excess: Table, ranks: np.ndarray, found: list[Finding], step: float) -> np.ndarray:
    """Return which ranks may only be waiting for one that is slow in its own work."""
    pure = [slow for slow in found if slow.phase in _PURE]
    explained = np.zeros(len(ranks), dtype=bool)
    for slow in pure:
        explained |= (ranks != slow.rank) & (excess <= 2 * slow.cost * step)
    return explained


def _median_of_others(values: Table) -> Table:
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    place_of = np.empty(len(values), dtype=int)
    place_of[order] = np.arange(len(values))
    low, high = (len(values) - 2) // 2, (len(values) - 1) // 2
    others: Table = (ordered[low + (place_of <= low)] + ordered[high + (place_of <= high)]) / 2
    return others


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 0.01 else f"{seconds * 1e3:.2f} ms"
