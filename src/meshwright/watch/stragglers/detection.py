"""Find stragglers from the windows of all ranks: the rank, the phase, and the cost for the run.

All ranks take the same time per step, because they wait for the slowest. So the duration of a step says nothing; the
duration of the phases in which a rank does its own work does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...runtime import phases
from .. import place
from ..reports import format_ranks
from .windows import FIELDS, KEPT, LENGTH, MEDIANS, NUMBER, SPREADS, WHOLE, Table

SHARE_OF_STEP = 0.05
SHARE_OF_PHASE = 0.15
LEAST_SECONDS = 0.001
"""Smaller differences are noise of the operating system."""
CONSECUTIVE = 3
"""Consecutive windows after which a rank counts as slow, or no longer does."""
_REPLACING_FACTOR = 1.5
"""How much more a straggler must cost than the current one to replace it."""
_SPREAD_TO_ERROR = 1.86
"""Ratio of the standard error of the median, times the root of the number of steps, to the median deviation."""
_PHASE_NAMES = {
    phases.DATA: place.DATA,
    phases.STEP: place.STEP,
    phases.FORWARD: place.FORWARD,
    phases.OTHER: place.USER_CODE,
}
_LOCAL_PHASES = (phases.DATA, phases.STEP)

# [Note: which rank is the culprit]
# A rank is compared with the median of the others, in the phases of its own work. The backward pass and collectives are
# waiting, and saving is the main process's work: no rank is blamed for those. A forward pass or the script's own code
# may contain collectives that cannot be seen from outside (buffers, sharded parameters): there the ranks that wait for
# a straggler look slow themselves. Waiting for data and the optimizer's step contain none. So a rank that is slow in
# one of those explains the time that others spend in the passes.


@dataclass(frozen=True)
class SlowRank:
    """A straggler: a rank that makes the others wait."""

    rank: int
    phase: int
    seconds: float
    usual: float
    """The median of the others."""
    cost: float
    """The fraction of every step that the run would save."""
    also: tuple[int, ...] = ()
    """Other ranks that are slow in the same phase."""

    def __str__(self) -> str:
        also = f" {format_ranks(self.also)} too." if self.also else ""
        return (
            f"Rank {self.rank} is slow in {_PHASE_NAMES[self.phase]}: {_seconds(self.seconds)} per step, where the "
            f"others need {_seconds(self.usual)}. It costs the run {self.cost:.0%} of every step.{also}"
        )

    def resolved_message(self) -> str:
        """Return the message for the end of the slowdown."""
        return f"Rank {self.rank} is no longer slow in {_PHASE_NAMES[self.phase]}."


@dataclass(frozen=True)
class Window:
    """The same steps on all ranks that took part in them, and the straggler, if any."""

    ranks: list[int]
    rows: Table
    finding: SlowRank | None

    def renamed(self, names: Sequence[int]) -> Window:
        """Return it with other names of the ranks."""
        finding = self.finding
        if finding is not None:
            also = tuple(names[rank] for rank in finding.also)
            finding = replace(finding, rank=names[finding.rank], also=also)
        return replace(self, ranks=[names[rank] for rank in self.ranks], finding=finding)


class StragglerDetector:
    """Compare successive windows, and track the current straggler."""

    def __init__(self) -> None:
        self.current: SlowRank | None = None
        self._examined = (0, -1)
        self._slow_for: dict[tuple[int, int], int] = {}
        self._absent_for = 0

    def is_pending(self, window: Table) -> bool:
        """Return whether a window has not been examined yet."""
        return bool(window[LENGTH]) and self._examined != (window[LENGTH], window[NUMBER])

    def update(self, table: Table) -> Iterator[Window]:
        """Examine the windows that are new and complete; those of rank 0 determine which there are."""
        length = int(table[0, -1, LENGTH])
        if length and length != self._examined[0]:
            self._examined = length, -1
        valid = table[:, :, LENGTH] == length if length else np.zeros(table.shape[:2], dtype=bool)
        newest = np.where(valid, table[:, :, NUMBER], -1.0).max(axis=1)
        is_running = newest >= newest[0] - KEPT
        for number in table[0, valid[0], NUMBER]:
            if number <= self._examined[1]:
                continue
            found = valid & (table[:, :, NUMBER] == number)
            took_part = found.any(axis=1)
            if (is_running & (newest < number)).any():
                return  # a rank has not published it yet
            self._examined = length, int(number)
            ranks = np.flatnonzero(took_part)
            rows = table[found].reshape(-1, FIELDS)
            self._track(slow_ranks(ranks, rows))
            yield Window(ranks.tolist(), rows, self.current)

    def _track(self, slow: list[SlowRank]) -> None:
        self._slow_for = {key: self._slow_for.get(key, 0) + 1 for key in ((found.rank, found.phase) for found in slow)}
        confirmed = [found for found in slow if self._slow_for[found.rank, found.phase] >= CONSECUTIVE]
        worst = max(confirmed, key=lambda found: found.cost, default=None)
        current, before = worst, self.current
        if before is not None:
            again = [found for found in slow if (found.rank, found.phase) == (before.rank, before.phase)]
            self._absent_for = 0 if again else self._absent_for + 1
            stays = again[0] if again else before if self._absent_for < CONSECUTIVE else None
            if stays is not None and (worst is None or worst.cost < _REPLACING_FACTOR * stays.cost):
                current = stays  # of several equally slow ranks, always name the same one
        self.current = current


def slow_ranks(ranks: np.ndarray, rows: Table) -> list[SlowRank]:
    """Return the slow ranks of one window. See [Note: which rank is the culprit]."""
    if len(ranks) < 2:
        return []
    step, length = float(np.median(rows[:, WHOLE])), rows[0, LENGTH]
    medians, spreads = rows[:, MEDIANS], rows[:, SPREADS]
    # With many ranks one is always an outlier by chance: the more ranks, the farther it must be.
    sigmas = 2.5 + math.sqrt(2 * math.log(len(ranks)))
    found: list[SlowRank] = []
    for phase in _PHASE_NAMES:
        seconds, spread = medians[:, phase], spreads[:, phase]
        usual = _median_of_others(seconds)
        excess = seconds - usual
        error = np.maximum(spread, np.median(spread)) * (_SPREAD_TO_ERROR / math.sqrt(length))
        slow = (excess >= max(SHARE_OF_STEP * step, LEAST_SECONDS)) & (excess >= SHARE_OF_PHASE * usual)
        slow &= excess >= sigmas * error
        if phase not in _LOCAL_PHASES:
            slow &= ~_explained(excess, ranks, found, step)
        indices = np.flatnonzero(slow)
        for index in indices:
            also = tuple(int(ranks[other]) for other in indices if other != index)
            cost = float(excess[index]) / step
            found.append(SlowRank(int(ranks[index]), phase, float(seconds[index]), float(usual[index]), cost, also))
    return found


def _explained(excess: Table, ranks: np.ndarray, found: list[SlowRank], step: float) -> np.ndarray:
    """Return which ranks may only be waiting for one that is slow in its own work."""
    local = [slow for slow in found if slow.phase in _LOCAL_PHASES]
    explained = np.zeros(len(ranks), dtype=bool)
    for slow in local:
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
