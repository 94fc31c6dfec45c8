"""Downsampling keeps the extremes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, strategies as st

from meshwright.tools.report.runs.reading import Points
from meshwright.tools.report.runs.sampling import PER_BUCKET, bucket_edges, bucket_means, downsampled, not_finite

numbers = st.floats(allow_nan=True, allow_infinity=True, width=32)


def curve(values: np.ndarray) -> Points:
    places = np.arange(len(values), dtype=float)
    return Points(places, places * 2, values)


def test_a_short_curve_is_kept_whole() -> None:
    assert downsampled(np.array([3.0, np.nan, 1.0]), 8).tolist() == [0, 1, 2]


@given(values=st.lists(numbers, min_size=1, max_size=300), limit=st.integers(8, 64))
def test_every_bucket_keeps_its_first_lowest_highest_and_last(values: list[float], limit: int) -> None:
    everything = np.array(values)
    indices = downsampled(everything, limit)
    assert len(indices) <= limit
    assert (np.diff(indices) > 0).all(), "in order, each once"
    if len(values) <= limit:
        return
    edges = bucket_edges(len(values), limit)
    for begin, end in pairwise(edges):
        inside = indices[(indices >= begin) & (indices < end)]
        assert {begin, end - 1} <= set(inside.tolist())
        finite = everything[begin:end][np.isfinite(everything[begin:end])]
        if len(finite):
            shown = everything[inside]
            shown = shown[np.isfinite(shown)]
            assert (shown.min(), shown.max()) == (finite.min(), finite.max())


def test_a_single_spike_among_a_million_stays() -> None:
    values = np.zeros(1_000_000)
    values[123_457], values[987_654] = 1.0, -1.0
    assert {123_457, 987_654} <= set(downsampled(values, 2000).tolist())


def test_the_means_count_a_spike_as_one_value_of_many() -> None:
    values = np.ones(1000)
    values[500] = 101.0
    mean = bucket_means(curve(values), 40)
    assert len(mean.value) == 40 // PER_BUCKET
    assert sorted(mean.value.tolist()) == [1.0] * 9 + [2.0]
    assert mean.step.tolist() == [49.5 + 100 * i for i in range(10)]


def test_values_that_are_not_finite_leave_a_mean_alone_and_fill_a_gap() -> None:
    values = np.ones(100)
    values[3] = np.nan
    values[20:30] = np.inf
    mean = bucket_means(curve(values), 40)
    assert mean.value[0] == 1.0
    assert np.isnan(mean.value[2])


def test_values_that_are_not_finite_are_counted_and_some_are_marked() -> None:
    values = np.ones(10_000)
    values[1000:9000] = np.nan
    values[9500] = -np.inf
    count, marks = not_finite(curve(values), 100)
    assert count == 8001
    assert len(marks.step) == 100
    assert (marks.step[0], marks.step[-1]) == (1000, 9500)
    assert not_finite(curve(np.ones(5)), 100)[0] == 0
