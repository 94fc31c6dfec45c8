"""Read the memory of a rank from its trace: the peak, by owner, where and when, and memory over the step."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from ..trace import COMMUNICATION, MAIN_STREAM, OWNERS, SETUP, Trace
from .allocator import Simulation, simulate
from .lifetimes import Integers, Lifetimes, Passes, lifetimes_of, pattern_of
from .sweep import AllocationSweep, curves_by_owner, events_in_order, peaks_by_place, places_of, sweep

_POINTS = 320
_LARGEST = 12


@dataclass
class Moment:
    """When and where something happened."""

    step: int
    """From 0; -1 before the first step."""
    phase: str
    module: str
    operation: str = ""


@dataclass
class Share:
    """Memory that one kind of module held at the peak for one purpose."""

    module: str
    """Its name with `*` for the number of a block."""
    owner: str
    bytes: float
    count: float


@dataclass
class Peak:
    """The largest memory at one place; see [Note: places] in `sweep`."""

    bytes: dict[str, float]
    """Owner -> bytes."""
    moment: Moment
    largest: list[Share] = field(default_factory=list)

    @property
    def total(self) -> float:
        """Return the bytes of all owners."""
        return sum(self.bytes.values())


@dataclass
class Timeline:
    """Memory over the last step. All lists are equally long."""

    at: list[float] = field(default_factory=list)
    """From 0, the beginning of the step, to 1, in the order in which work is issued: not time."""
    bytes: dict[str, list[float]] = field(default_factory=dict)
    reserved: list[float] = field(default_factory=list)
    """What the allocator holds, with its default settings."""
    passes: list[tuple[float, str]] = field(default_factory=list)
    """Where each pass begins, and its phase."""


@dataclass
class Memory:
    """The memory of one rank."""

    places: dict[str, Peak]
    """The peaks of all places in the steps, and of the setup."""
    most: dict[str, float]
    """Owner -> the most that it had at any time in the steps."""
    allocated: float
    """Peak of blocks in use, as torch counts them: sizes rounded up by the allocator."""
    reserved: float
    """Peak of what the allocator holds, with its default settings."""
    expandable: float
    """The same with expandable_segments:True."""
    timeline: Timeline
    blocks: int
    """Repeated blocks that it is of."""
    shape_of: int | None = None
    """If the numbers are extrapolated: of how many blocks the timeline has its shape."""

    @property
    def peak(self) -> Peak:
        """Return the peak in the steps."""
        steps = [peak for place, peak in self.places.items() if place != SETUP]
        return max(steps or self.places.values(), key=lambda peak: peak.total)

    @property
    def setup(self) -> float:
        """Return the peak before the first step."""
        return self.places[SETUP].total if SETUP in self.places else 0.0

    @property
    def total(self) -> float:
        """Return the bytes at the peak in the steps."""
        return self.peak.total

    @property
    def fragmentation(self) -> float:
        """Return the share of reserved bytes that no peak uses."""
        return 1 - self.total / self.reserved if self.reserved else 0.0


def memory_of(trace: Trace) -> Memory:
    """Compute the memory of the rank that a trace is of."""
    if not trace.allocations:
        raise ValueError("the trace has no allocations, so there is no memory to report.")
    lives = lifetimes_of(trace)
    found = sweep(lives)
    curves = curves_by_owner(lives, found.order)
    order, tick = events_in_order(_freed_by_streams(trace, lives))
    streams = [allocation.stream for allocation in trace.allocations]
    classic = simulate(order, lives.size, streams)
    growing = simulate(order, lives.size, streams, expandable=True)
    names, places = places_of(trace)
    peaks = peaks_by_place(found, places, names)
    first = min((allocation.born for allocation in trace.allocations if allocation.phase != SETUP), default=0)
    began = int(np.searchsorted(found.tick, first))
    return Memory(
        places=_described(trace, lives, found, curves, peaks),
        most={owner: float(curve[began:].max(initial=0)) for owner, curve in zip(OWNERS, curves, strict=True)},
        allocated=classic.allocated,
        reserved=classic.reserved,
        expandable=growing.reserved,
        timeline=_timeline(trace, lives.passes, found, curves, classic, tick),
        blocks=trace.blocks,
    )


def _freed_by_streams(trace: Trace, lives: Lifetimes) -> Lifetimes:
    """Return lives as the allocator sees them: it takes back what another stream uses when that stream is done."""
    pending = [c for c in trace.collectives if c.stream != MAIN_STREAM and c.needed is not None and c.needed > c.tick]
    if not pending:
        return lives
    freed = lives.freed.copy()
    begins = [collective.tick for collective in pending]
    for index, allocation in enumerate(trace.allocations):
        if allocation.owner != COMMUNICATION or allocation.stream != MAIN_STREAM:
            continue
        during = pending[bisect_left(begins, allocation.born) : bisect_left(begins, int(freed[index]))]
        freed[index] = max([int(freed[index]), *(c.needed for c in during if c.needed is not None)])
    return replace(lives, freed=freed)


def _described(
    trace: Trace, lives: Lifetimes, found: AllocationSweep, curves: list[Integers], peaks: Mapping[str, int]
) -> dict[str, Peak]:
    groups: dict[tuple[str, int], int] = {}
    group = np.array(
        [
            groups.setdefault((pattern_of(allocation.module), owner), len(groups))
            for allocation, owner in zip(trace.allocations, lives.owner.tolist(), strict=True)
        ]
    )
    position = np.zeros((2, len(lives.size)), dtype=np.int64)  # of the birth and of the end of each allocation
    born = found.order >= 0
    position[0, found.order[born]] = np.flatnonzero(born)
    position[1, -1 - found.order[~born]] = np.flatnonzero(~born)
    keys = list(groups)
    described = {}
    for place, at in peaks.items():
        live = (position[0] <= at) & (position[1] > at)
        sums = np.bincount(group[live], weights=lives.size[live], minlength=len(keys))
        counts = np.bincount(group[live], minlength=len(keys))
        largest = [
            Share(keys[index][0], OWNERS[keys[index][1]], float(sums[index]), float(counts[index]))
            for index in np.argsort(-sums, kind="stable")[:_LARGEST].tolist()
            if sums[index]
        ]
        bytes_of = {owner: float(curve[at]) for owner, curve in zip(OWNERS, curves, strict=True)}
        described[place] = Peak(bytes_of, _moment(trace, int(found.order[at]), int(found.tick[at])), largest)
    return described


def _moment(trace: Trace, index: int, tick: int) -> Moment:
    allocation = trace.allocations[index]
    step = -1 if allocation.phase == SETUP else bisect_right([step.began for step in trace.steps], tick) - 1
    at = bisect_left(trace.operations, tick, key=lambda operation: operation.tick)
    known = at < len(trace.operations) and trace.operations[at].tick == tick
    return Moment(step, allocation.phase, allocation.module, trace.operations[at].name if known else "")


def _timeline(
    trace: Trace, passes: Passes, found: AllocationSweep, curves: list[Integers], classic: Simulation, ticks: Integers
) -> Timeline:
    """Keep the largest moment of each of some hundred equal parts of the last step."""
    if not trace.steps:
        return Timeline()
    step = trace.steps[-1]
    length = max(1, step.ended - step.began)
    edges = step.began + np.arange(_POINTS + 1) * length / _POINTS
    bounds = np.searchsorted(found.tick, edges, side="left")
    chosen = [
        low + int(np.argmax(found.total[low:high])) if high > low else max(0, low - 1)
        for low, high in pairwise(bounds.tolist())
    ]
    grown = np.array([ticks[event] for event, _ in classic.growth])
    reserved = [0, *(size for _, size in classic.growth)]
    in_step = [
        (max(0.0, (int(tick) - step.began) / length), phase)
        for tick, following, phase in zip(passes.began, [*passes.began[1:], step.ended + 1], passes.phases, strict=True)
        if following > step.began and tick <= step.ended
    ]
    return Timeline(
        at=[(index + 0.5) / _POINTS for index in range(_POINTS)],
        bytes={owner: curve[chosen].astype(float).tolist() for owner, curve in zip(OWNERS, curves, strict=True)},
        reserved=[float(reserved[int(np.searchsorted(grown, edge, side="left"))]) for edge in edges[1:]],
        passes=in_step,
    )
