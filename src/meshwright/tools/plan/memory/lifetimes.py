"""The life of every allocation of a trace, as arrays, and what it was used for.

[Note: whose memory] A tracer cannot know what an intermediate result is for when it is made. Here its whole life is
known. What the forward pass makes and a later pass frees was kept for the backward pass: activations. What the backward
pass makes and leaves to a later pass are gradients, such as those that FSDP accumulates before it reduces them. What is
freed within its own pass is a temporary. A pass is an uninterrupted run of one phase, so that micro-batches count one
by one. All other memory (weights, optimizer state, gathered parameters, buffers of collectives) is known at once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ..trace import ACTIVATIONS, BACKWARD, COPIES, FORWARD, GRADIENTS, OWNERS, TEMPORARIES, Trace

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_KEPT, _SHORT, _GRADIENTS, _COPIES = map(OWNERS.index, (ACTIVATIONS, TEMPORARIES, GRADIENTS, COPIES))
_BLOCK = re.compile(r"(?:[^.]+\.)*?\d+(?=\.|$)")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass
class Passes:
    """The uninterrupted runs of one phase, in order."""

    began: Integers
    phases: list[str]

    def at(self, ticks: Integers) -> Integers:
        """Return the numbers of the passes at some ticks; -1 before the first."""
        return np.searchsorted(self.began, ticks, side="right").astype(np.int64) - 1


@dataclass
class Lifetimes:
    """Allocations of a trace, in its order. Each exists from the tick `born` until before the tick `freed`."""

    size: Integers
    born: Integers
    freed: Integers
    """After all other ticks if it existed at the end."""
    owner: Integers
    """Position in `OWNERS`."""
    passes: Passes


def passes_of(trace: Trace) -> Passes:
    """Find the passes of a trace."""
    events = sorted(
        {(event.tick, event.phase) for event in trace.operations}
        | {(event.tick, event.phase) for event in trace.collectives}
        | {(event.born, event.phase) for event in trace.allocations}
    )
    runs = [event for index, event in enumerate(events) if index == 0 or event[1] != events[index - 1][1]]
    return Passes(np.array([tick for tick, _ in runs], dtype=np.int64), [phase for _, phase in runs])


def lifetimes_of(trace: Trace) -> Lifetimes:
    """Return the allocations as arrays, with the owners that their lives show."""
    passes = passes_of(trace)
    allocations = trace.allocations
    count = len(allocations)
    numbers = {owner: number for number, owner in enumerate(OWNERS)}
    born = np.fromiter((a.born for a in allocations), np.int64, count)
    freed = np.fromiter((-1 if a.freed is None else a.freed for a in allocations), np.int64, count)
    last = max(int(born.max(initial=0)), int(freed.max(initial=0)), *(step.ended for step in trace.steps), 0)
    freed = np.where(freed < 0, last + 1, freed)
    owner = np.fromiter((numbers[a.owner] for a in allocations), np.int64, count)
    forward = np.fromiter((a.phase == FORWARD for a in allocations), np.bool_, count)
    backward = np.fromiter((a.phase == BACKWARD for a in allocations), np.bool_, count)
    longer = passes.at(freed - 1) > passes.at(born)
    by_life = np.where(forward & longer, _KEPT, np.where(backward & longer, _GRADIENTS, _SHORT))
    by_life = np.where((owner == _COPIES) & (by_life == _KEPT), _COPIES, by_life)
    owner = np.where((owner == _KEPT) | (owner == _SHORT) | (owner == _COPIES), by_life, owner)
    return Lifetimes(np.fromiter((a.size for a in allocations), np.int64, count), born, freed, owner, passes)


@lru_cache(maxsize=100_000)
def pattern_of(module: str) -> str:
    """Return a module's name with `*` for numbers: `layers.*.mlp`."""
    return _NUMBER.sub("*", module)


@lru_cache(maxsize=100_000)
def block_of(module: str) -> str | None:
    """Return the numbered module that a module is in, or is: `layers.3` of `layers.3.mlp`."""
    found = _BLOCK.match(module)
    return None if found is None else found[0]
