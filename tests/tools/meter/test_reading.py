"""What the meter says in words."""

from __future__ import annotations

from dataclasses import replace

from meshwright.tools.meter.reading import Reading

READING = Reading(
    steps_per_second=1.0,
    samples_per_second=8.0,
    tokens_per_second=None,
    flops_per_second=7.11e6,
    recomputed_flops_per_second=0.0,
    utilization=0.412,
    memory_peak=0,
    shares={},
    seconds_left=None,
    ranks=1,
)


def test_a_utilization_that_rounds_to_nothing_is_left_out() -> None:
    assert READING.speed() == "8 samples/s · 7.11MFLOP/s (41.2% of peak)"
    assert replace(READING, utilization=0.00001).speed() == "8 samples/s · 7.11MFLOP/s"
    assert replace(READING, utilization=None).speed() == "8 samples/s · 7.11MFLOP/s"
