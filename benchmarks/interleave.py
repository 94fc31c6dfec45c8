"""Compare two pieces of code on a machine that is busy with other things.

Absolute times mean little there: the clock speed drifts, caches are shared, and other processes take the core away. So
both sides run in one process, in laps of about a millisecond, and only ratios are kept:

- A *lap* is one training step. A *round* is eight laps, A B B A B A A B, and in every other round the sides change
  places: each comes equally often first, after itself and after the other, so drift and warm caches cancel.
- The fastest of a side's four laps stands for it in the round: what an interruption adds is no part of the cost.
- Both sides are built anew a few times on the way, now one first, now the other: where an object happens to lie in
  memory is worth a percent.
- The result is the median of the rounds' ratios, with the interval that covers the true median in 95 of 100 runs.

Garbage is not collected while the clock runs. What is left of the noise shows in the control row of `step.py`, where
both sides are the same.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Literal

Lap = Callable[[], float]
"""Run one lap and return the seconds it took."""

Verdict = Literal["met", "missed", "unclear", "-"]

ORDER = "ABBABAAB"
MIRRORED = str.maketrans("AB", "BA")
WARM_UP_LAPS = 20
MOST_BUILDS = 4
ROUNDS_PER_BUILD = 25


@dataclass(frozen=True)
class Comparison:
    """One row of the table: what a lap costs in bare PyTorch and through a library."""

    what: str
    """What is done in a lap."""
    costs: list[tuple[float, float]]
    """The seconds of every round, in bare PyTorch and through the library."""
    target: float | None = None
    """What the ratio must not exceed; None where nothing is promised."""
    notes: list[str] = field(default_factory=list)
    """Findings that are not numbers."""

    @property
    def bare_us(self) -> float:
        """The median cost in bare PyTorch, in microseconds."""
        return median(bare for bare, _ in self.costs) * 1e6

    @property
    def library_us(self) -> float:
        """The median cost through the library, in microseconds."""
        return median(library for _, library in self.costs) * 1e6

    @property
    def ratio(self) -> float:
        """The median over the rounds of library / bare."""
        return median(self._ratios)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the ratio."""
        return _median_interval(self._ratios)

    @property
    def _ratios(self) -> list[float]:
        return sorted(library / bare for bare, library in self.costs)

    @property
    def verdict(self) -> Verdict:
        """Tell whether the target is met, or whether the interval leaves that open."""
        if self.target is None:
            return "-"
        low, high = self.interval
        if high <= self.target:
            return "met"
        return "missed" if low > self.target else "unclear"


def timed(steps: Iterator[object], fence: Callable[[], object] | None = None) -> Lap:
    """Make a lap of one `next()` of a loop that yields after every step.

    `fence` runs before the clock starts: a barrier, where the loop has several processes.
    """

    def lap() -> float:
        if fence is not None:
            fence()
        start = perf_counter()
        next(steps)
        return perf_counter() - start

    return lap


def compare(
    what: str,
    bare: Callable[[], Lap],
    library: Callable[[], Lap],
    *,
    rounds: int,
    target: float | None = None,
    warm_up: int = WARM_UP_LAPS,
) -> Comparison:
    """Interleave the laps of two sides and return what one costs in terms of the other."""
    builds = max(1, min(MOST_BUILDS, rounds // ROUNDS_PER_BUILD))
    order = ORDER
    costs: list[tuple[float, float]] = []
    for build in range(builds):
        laps = _built(bare, library, warm_up, library_first=build % 2 == 1)
        with _without_garbage_collection():
            for _ in range(share(rounds, builds, build)):
                times = [(side, laps[side]()) for side in order]
                costs.append((_fastest("A", times), _fastest("B", times)))
                order = order.translate(MIRRORED)
    return Comparison(what, costs, target)


def _built(bare: Callable[[], Lap], library: Callable[[], Lap], warm_up: int, *, library_first: bool) -> dict[str, Lap]:
    """Build both sides and let them run warm."""
    sides = [("B", library), ("A", bare)] if library_first else [("A", bare), ("B", library)]
    laps = {side: build() for side, build in sides}
    for _ in range(warm_up):
        for lap in laps.values():
            lap()
    return laps


def share(total: int, parts: int, index: int) -> int:
    """Return the size of one of the nearly equal parts of a total."""
    return total * (index + 1) // parts - total * index // parts


def _fastest(side: str, times: list[tuple[str, float]]) -> float:
    return min(seconds for who, seconds in times if who == side)


def _median_interval(ordered: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median by order statistics, which assume nothing about the noise."""
    middle, spread = len(ordered) / 2, 0.98 * math.sqrt(len(ordered))
    low = max(0, math.floor(middle - spread))
    high = min(len(ordered) - 1, math.ceil(middle + spread) - 1)
    return ordered[low], ordered[high]


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
