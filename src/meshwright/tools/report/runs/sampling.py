"""Downsample a curve without hiding extremes: every bucket keeps its first, lowest, highest and last point."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .reading import Floats, Points

PER_BUCKET = 4


def bucket_edges(length: int, limit: int) -> npt.NDArray[np.int64]:
    """Return where buckets of nearly equal size begin, and the end of the last one."""
    return np.linspace(0, length, max(1, limit // PER_BUCKET) + 1).astype(np.int64)


def downsampled(values: Floats, limit: int) -> npt.NDArray[np.int64]:
    """Return the indices of at most `limit` points, extremes included."""
    length = len(values)
    if length <= limit:
        return np.arange(length)
    edges = bucket_edges(length, limit)
    begins, ends = edges[:-1], edges[1:]
    # One row per bucket; the shorter ones repeat their last point.
    rows = np.minimum(begins[:, None] + np.arange((ends - begins).max()), ends[:, None] - 1)
    inside = values[rows]
    finite = np.isfinite(inside)
    lowest = np.where(finite, inside, np.inf).argmin(axis=1)
    highest = np.where(finite, inside, -np.inf).argmax(axis=1)
    bucket = np.arange(len(rows))
    return np.unique(np.concatenate([begins, ends - 1, rows[bucket, lowest], rows[bucket, highest]]))


def bucket_means(points: Points, limit: int) -> Points:
    """Return the mean point of every bucket, from its finite values, for smoothed curves.

    Means of the downsampled points would weigh a single spike as much as the thousand values around it.
    """
    edges = bucket_edges(len(points.value), limit)
    begins, sizes = edges[:-1], np.diff(edges)
    finite = np.isfinite(points.value)
    with np.errstate(invalid="ignore", over="ignore"):  # a bucket without any finite value is NaN: a gap in the curve
        value = np.add.reduceat(np.where(finite, points.value, 0.0), begins) / np.add.reduceat(
            finite, begins, dtype=int
        )
    step, time = (np.add.reduceat(column, begins) / sizes for column in (points.step, points.time))
    return Points(step, time, value)


def not_finite(points: Points, limit: int) -> tuple[int, Points]:
    """Return how many values are NaN or infinite, and some of them, spread evenly, to mark at the axis."""
    where = np.flatnonzero(~np.isfinite(points.value))
    shown = where[np.unique(np.linspace(0, len(where) - 1, min(len(where), limit)).astype(np.int64))]
    return len(where), points.at(shown)
