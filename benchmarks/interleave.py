"""Compare two pieces of code on a machine that is busy with other things.

Absolute times mean little there: the clock speed drifts, caches are shared, and other processes take the core away. So
both sides run in one process, in laps of about a millisecond, and only ratios are kept:

- A *lap* is one training step. A *round* is eight laps in an order that favours nobody (A B B A B A A B): each side
  comes equally often first, second, after itself and after the other, so drift and warm caches cancel.
- The fastest of a side's four laps stands for it in the round: what an interruption adds is no part of the cost.
- The result is the median of the rounds' ratios, with the interval that covers the true median in 95 of 100 runs.

Garbage is not collected while the clock runs. Two equal sides give 1.000 (see the control row of `step.py`).
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


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One row of the table: what a lap costs in bare PyTorch and through the library."""

    what: str
    """What was done in a lap."""
    bare_us: float
    """The median cost in bare PyTorch, in microseconds."""
    ours_us: float
    """The median cost through the library, in microseconds."""
    ratio: float
    """The median over the rounds of ours / bare."""
    low: float
    """The lower end of the ratio's 95 % interval."""
    high: float
    """The upper end of the ratio's 95 % interval."""
    target: float | None = None
    """What the ratio must not exceed; None where nothing is promised."""
    notes: list[str] = field(default_factory=list)
    """Findings that are not numbers."""

    @property
    def verdict(self) -> Verdict:
        """Tell whether the target is met, or whether the interval leaves that open."""
        if self.target is None:
            return "-"
        if self.high <= self.target:
            return "met"
        return "missed" if self.low > self.target else "unclear"


def timed(steps: Iterator[object], fence: Callable[[], object] | None = None) -> Lap:
    """Make a lap of one `next()` of a training loop that yields after every step.

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
    bare: Lap,
    ours: Lap,
    *,
    rounds: int,
    target: float | None = None,
    order: str = ORDER,
    warm_up: int = 20,
) -> Comparison:
    """Interleave the laps of two sides and return what one costs in terms of the other."""
    for _ in range(warm_up):
        bare()
        ours()
    bare_costs: list[float] = []
    ours_costs: list[float] = []
    with _without_garbage_collection():
        for _ in range(rounds):
            laps = [(side, bare() if side == "A" else ours()) for side in order]
            bare_costs.append(min(seconds for side, seconds in laps if side == "A"))
            ours_costs.append(min(seconds for side, seconds in laps if side == "B"))
    ratios = sorted(b / a for a, b in zip(bare_costs, ours_costs, strict=True))
    low, high = _median_interval(ratios)
    return Comparison(
        what=what,
        bare_us=median(bare_costs) * 1e6,
        ours_us=median(ours_costs) * 1e6,
        ratio=median(ratios),
        low=low,
        high=high,
        target=target,
    )


def _median_interval(ordered: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median by order statistics: no assumption about the noise."""
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
