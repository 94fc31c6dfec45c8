"""Memory over time and its peaks, from lifetimes.

[Note: places] A deep model is traced with few of its repeated blocks, at two depths, and every number is extrapolated.
The peak of a step is the largest of many moments, and which one it is can change with the depth. So the peak of every
place is kept: of each phase and module, where the first and the last block count apart from those between. At one place
memory is linear in the number of blocks, and the largest of the extrapolated peaks is the peak of the deep model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..trace import OWNERS, SETUP, Trace
from .lifetimes import Integers, Lifetimes, block_of, pattern_of


@dataclass
class AllocationSweep:
    """Every birth and end of an allocation, in order, and the memory after each."""

    order: Integers
    """Index of the allocation; minus one minus the index if it ends."""
    tick: Integers
    total: Integers
    """Bytes after the event."""


def events_in_order(lives: Lifetimes) -> tuple[Integers, Integers]:
    """Return all births and ends in order, and their ticks.

    At one tick, what ends makes room for what begins. What begins and ends at one tick, inside of an operation, counts.
    """
    count = len(lives.size)
    inside = (lives.freed <= lives.born).astype(np.int64)
    keys = np.concatenate((lives.born * 4 + 1, np.maximum(lives.freed, lives.born) * 4 + 2 * inside))
    position = np.argsort(keys, kind="stable")
    index = np.where(position < count, position, count - 1 - position)
    return index.astype(np.int64), (keys[position] // 4).astype(np.int64)


def sweep(lives: Lifetimes) -> AllocationSweep:
    """Add up the sizes in the order of events."""
    order, tick = events_in_order(lives)
    return AllocationSweep(order, tick, np.cumsum(signed_sizes(lives, order)))


def signed_sizes(lives: Lifetimes, order: Integers) -> Integers:
    """Return the change of memory by each event."""
    return np.where(
        order >= 0,
        lives.size[np.where(order >= 0, order, -1 - order)],
        -lives.size[np.where(order >= 0, 0, -1 - order)],
    )


def curves_by_owner(lives: Lifetimes, order: Integers) -> list[Integers]:
    """Return the bytes of each of `OWNERS` after each event."""
    changes = signed_sizes(lives, order)
    owner = lives.owner[np.where(order >= 0, order, -1 - order)]
    return [np.cumsum(np.where(owner == number, changes, 0)) for number in range(len(OWNERS))]


def places_of(trace: Trace) -> tuple[list[str], Integers]:
    """Return names of places, and the place of every allocation."""
    spans = _spans(trace)
    numbers: dict[str, int] = {}
    known: dict[tuple[str, str], int] = {}
    places = []
    for allocation in trace.allocations:
        key = (allocation.phase, allocation.module)
        if key not in known:
            name = SETUP if key[0] == SETUP else f"{key[0]} {_position(key[1], spans)} {pattern_of(key[1])}"
            known[key] = numbers.setdefault(name, len(numbers))
        places.append(known[key])
    return list(numbers), np.array(places, dtype=np.int64)


def _spans(trace: Trace) -> dict[str, tuple[int, int]]:
    """Return the lowest and the highest number of each family of blocks."""
    spans: dict[str, tuple[int, int]] = {}
    for module in {allocation.module for allocation in trace.allocations}:
        block = block_of(module)
        if block is not None:
            family, _, number = block.rpartition(".")
            low, high = spans.get(family, (int(number), int(number)))
            spans[family] = (min(low, int(number)), max(high, int(number)))
    return spans


def _position(module: str, spans: dict[str, tuple[int, int]]) -> str:
    block = block_of(module)
    if block is None:
        return "-"
    family, _, number = block.rpartition(".")
    low, high = spans[family]
    return "last" if int(number) == high else "first" if int(number) == low else "middle"


def peaks_by_place(found: AllocationSweep, places: Integers, names: Sequence[str]) -> dict[str, int]:
    """Return, for each place, the position in the order of its largest moment."""
    births = np.flatnonzero(found.order >= 0)
    place = places[found.order[births]]
    total = found.total[births]
    ranked = np.lexsort((-births, total, place))  # of equal moments the first
    last_of_place = np.flatnonzero(np.append(np.diff(place[ranked]), 1))
    return {names[int(place[ranked[at]])]: int(births[ranked[at]]) for at in last_of_place}
