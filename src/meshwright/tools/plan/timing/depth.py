"""Combine timings: of a deep model from traces with few of its repeated blocks, and of several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from .step import Timing


def extrapolated(a: Timing, b: Timing, factor: float) -> Timing:
    """Return the timing at a point of the line from `a` (factor 0) to `b` (factor 1)."""
    return combined([(1 - factor, a), (factor, b)])


def combined(parts: Sequence[tuple[float, Timing]]) -> Timing:
    """Return a sum of timings with weights. No number of it is negative."""
    result = Timing(seconds=max(0.0, sum(weight * timing.seconds for weight, timing in parts)))
    for entry in fields(Timing)[1:]:
        sums: dict[str, float] = getattr(result, entry.name)
        for weight, timing in parts:
            for key, value in getattr(timing, entry.name).items():
                sums[key] = sums.get(key, 0.0) + weight * value
        sums.update({key: max(0.0, value) for key, value in sums.items()})
    return result
