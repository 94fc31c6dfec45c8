"""The meter: a step that it measures, and the same step without; what a reading costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.optim import SGD

from meshwright import GradientState
from meshwright.runtime import phases

from .contenders.accelerate import steps as our_steps
from .interleave import Comparison, Lap, compare, timed
from .task import loader, model

READINGS = 200
STEPS = 64
"""Of a lap: the meter measures the phases of one short step in 32."""


def run(rounds: int) -> list[Comparison]:
    """Measure a step on one process."""
    torch.set_num_threads(1)
    row = compare(
        "step with the meter / without", lambda: lap_of(False), lambda: lap_of(True), rounds=rounds, target=1.005
    )
    cost = cost_of_a_reading()
    phases.clock = phases.meter = None
    return [replace(row, notes=[f"a reading costs {cost * 1e6:.0f} us"])]


def lap_of(metered: bool) -> Lap:
    """Return steps whose process has a clock only if it is metered."""
    clock: phases.PhaseClock | None = None
    if metered:
        phases.clock = None  # it starts its own
    net = model()
    step = timed(our_steps(net, SGD(net.parameters(), 0.1), loader(), meter=metered))

    def lap() -> float:
        nonlocal clock
        phases.clock = clock
        seconds = sum(step() for _ in range(STEPS))
        if metered:
            clock = phases.clock
        return seconds

    return lap


def cost_of_a_reading() -> float:
    """Return the seconds of one reading, after some steps."""
    lap = lap_of(True)
    lap()
    read: Callable[[], object] = GradientState().meter.read
    start = time.perf_counter()
    for _ in range(READINGS):
        read()
    return (time.perf_counter() - start) / READINGS
