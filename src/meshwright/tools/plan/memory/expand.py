"""Turn the memory of a trace with few of the repeated blocks into that of all of them.

[Note: blocks in between] What the allocator holds is not linear in the number of blocks, so the numbers of two depths
do not give that of a third. But all blocks between the first and the last do the same. Every pass over the blocks,
forward or backward, is cut where each block begins to compute, and the part of one block in the middle is repeated. An
allocation that begins in one block and ends in another ends as many blocks later in every repetition. Lists over all
parameters (weights, optimizer state, temporaries of an optimizer that works on lists) contain the same sizes once per
block, and grow by as many as are missing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import filterfalse, groupby

from ..trace import (
    ACTIVATIONS,
    BACKWARD,
    COMMUNICATION,
    FORWARD,
    GATHERED,
    SETUP,
    TEMPORARIES,
    WEIGHTS,
    Allocation,
    Operation,
    Trace,
    TracedStep,
)
from .lifetimes import block_of
from .visits import Blocks, BlockSweep, CannotExpandError, Visit

_LONGEST_LIST = 20_000
_PASSING = (COMMUNICATION, GATHERED)
"""Owners of buffers that live for a block or two, and never for all of them."""


def expanded(trace: Trace, extra: int, period: int = 1) -> Trace:
    """Return the trace with so many more blocks on its rank; `period` blocks together are one that repeats.

    Allocations, operations and steps are complete. Collectives stay those of the traced blocks.
    """
    if extra == 0:
        return trace
    if extra % period:
        raise CannotExpandError(f"{extra} more blocks are not a multiple of the {period} that repeat.")
    return _Expansion(trace, extra // period, period).trace()


class _Expansion:
    """A trace, and the block that is repeated in it.

    Blocks are counted from 0 in the traced model (`block`) and in the expanded one (`target`).
    """

    def __init__(self, trace: Trace, extra: int, period: int) -> None:
        self._trace = trace
        self._extra = extra
        self._period = period
        self._blocks = Blocks.of(trace, period)
        self._chosen = (self._blocks.count - 1) // 2
        self._sweeps = self._blocks.sweeps(trace)
        visits = sorted((v for sweep in self._sweeps for v in sweep.visits.values()), key=lambda visit: visit.begin)
        self._visits = visits
        self._begins = [visit.begin for visit in visits]
        repeated = [visit for visit in visits if visit.block == self._chosen]
        self._ends = [visit.end for visit in repeated]
        self._shifts = [0]
        for visit in repeated:
            self._shifts.append(self._shifts[-1] + extra * (visit.end - visit.begin))

    # --- ticks ------------------------------------------------------------------------------------------------------

    def _visit(self, tick: int) -> Visit | None:
        at = bisect_right(self._begins, tick) - 1
        return self._visits[at] if at >= 0 and tick < self._visits[at].end else None

    def _moved(self, tick: int, copy: int = 0) -> int:
        """Return the new tick; `copy` counts the repetitions of the chosen block, the traced one is 0."""
        shift = self._shifts[bisect_right(self._ends, tick)]
        visit = self._visit(tick)
        if visit is not None and visit.block == self._chosen:
            position = copy if self._sweeps[visit.sweep].ascending else self._extra - copy
            shift += position * (visit.end - visit.begin)
        return tick + shift

    def _target(self, block: int, copy: int = 0) -> int:
        return block + (copy if block == self._chosen else self._extra if block > self._chosen else 0)

    def _ended(self, allocation: Allocation, freed: int, begun: Visit | None, copy: int) -> int:
        """Return the new tick of an end."""
        visit = self._visit(freed)
        passing = allocation.owner in _PASSING
        if visit is None:
            return self._moved(freed) if begun is None or not passing else self._ended_after_pass(freed, begun, copy)
        sweep = self._sweeps[visit.sweep]
        target = self._target(visit.block, 0 if sweep.ascending else self._extra)  # as far from the begin of the pass
        if begun is not None and (passing or abs(visit.block - begun.block) < max(2, self._blocks.count - 1)):
            target = self._target(begun.block, copy) + visit.block - begun.block
        return self._in_target(sweep, target, freed - visit.begin)

    def _ended_after_pass(self, freed: int, begun: Visit, copy: int) -> int:
        """Return the new tick of the end of a buffer that passes: what comes after the last block is one more visit."""
        sweep = self._sweeps[begun.sweep]
        visits = list(sweep.visits.values())
        following = self._sweeps[begun.sweep + 1 :][:1]
        if freed < visits[-1].end or any(freed >= min(v.begin for v in each.visits.values()) for each in following):
            return self._moved(freed)
        way = 1 if sweep.ascending else -1
        target = self._target(begun.block, copy) + way * (len(visits) - visits.index(begun))
        if not 0 <= target < self._blocks.count + self._extra:
            return self._moved(freed)
        return self._in_target(sweep, target, freed - visits[-1].end)

    def _in_target(self, sweep: BlockSweep, target: int, offset: int) -> int:
        """Return the new tick at a distance from the begin of the visit of a block of the expanded model."""
        copy = min(max(target - self._chosen, 0), self._extra)
        visit = sweep.visits[target - copy]
        offset = min(offset, visit.end - visit.begin - 1)
        return self._moved(visit.begin, copy) + offset

    # --- events -----------------------------------------------------------------------------------------------------

    def trace(self) -> Trace:
        """Return the expanded trace."""
        trace = self._trace
        outside, allocations = [], []
        for allocation in trace.allocations:
            begun = self._visit(allocation.born)
            if begun is None:
                outside.append(allocation)
                continue
            allocations += [self._copied(allocation, begun, copy) for copy in self._copies(begun)]
        allocations += self._outside(outside)
        operations = [
            replace(each, tick=self._moved(each.tick, copy), module=self._renamed(each.module, visit, copy))
            for each in trace.operations
            for visit in (self._visit(each.tick),)
            for copy in self._copies(visit)
        ]
        return replace(
            trace,
            blocks=trace.blocks + self._extra * self._period * trace.stages,
            steps=[self._step(step) for step in trace.steps],
            allocations=sorted(allocations, key=lambda allocation: allocation.born),
            operations=sorted(operations, key=_tick),
            collectives=[replace(each, tick=self._moved(each.tick), needed=None) for each in trace.collectives],
        )

    def _copies(self, visit: Visit | None) -> range:
        return range(self._extra + 1) if visit is not None and visit.block == self._chosen else range(1)

    def _step(self, step: TracedStep) -> TracedStep:
        return replace(step, began=self._moved(step.began), ended=self._moved(step.ended))

    def _copied(self, allocation: Allocation, begun: Visit | None, copy: int) -> Allocation:
        freed = None if allocation.freed is None else self._ended(allocation, allocation.freed, begun, copy)
        born = self._moved(allocation.born, copy)
        if freed is not None and allocation.freed is not None and allocation.freed > allocation.born:
            freed = max(freed, born + 1)
        return replace(allocation, born=born, freed=freed, module=self._renamed(allocation.module, begun, copy))

    def _renamed(self, module: str, visit: Visit | None, copy: int) -> str:
        """Return the new name of a module; what a visit does for the next block already moves with the visit."""
        block = self._blocks.number(module)
        if block is None:
            return module
        name = block_of(module) or ""
        block = block if visit is None else visit.block
        number = int(name.rpartition(".")[2]) + (self._target(block, copy) - block) * self._period
        return f"{self._blocks.family}.{number}".lstrip(".") + module[len(name) :]

    # --- lists over all parameters ----------------------------------------------------------------------------------

    def _outside(self, allocations: Sequence[Allocation]) -> list[Allocation]:
        """Repeat what lists over all parameters have for one block; a region lies between two passes over blocks."""
        done, per_block = self._received(allocations), 0
        for _, region in groupby(
            filterfalse(self._is_received, allocations), key=lambda each: bisect_right(self._begins, each.born)
        ):
            members = list(region)
            at_tick: dict[int, list[Allocation]] = {}
            for each in members:
                at_tick.setdefault(each.born, []).append(each)
            lists: dict[tuple[int | None, str, str], list[Allocation]] = {}
            for tick, group in at_tick.items():
                together = len(group) >= self._blocks.count
                for each in group:
                    lists.setdefault((tick if together else None, each.owner, each.phase), []).append(each)
            for (_, owner, phase), group in lists.items():
                # Lists over all parameters are no part of a pass; a loss that is computed in parts looks like one.
                in_passes = phase in (FORWARD, BACKWARD) and owner in (ACTIVATIONS, TEMPORARIES)
                repeated = (
                    [self._copied(each, None, 0) for each in group] if in_passes else self._with_repetitions(group)
                )
                if owner == WEIGHTS:
                    per_block += (sum(a.size for a in repeated) - sum(a.size for a in group)) // self._extra
                done += repeated
                if owner == COMMUNICATION and len(repeated) == len(group):
                    done += self._more_buckets(group, per_block)
        return done

    def _received(self, allocations: Sequence[Allocation]) -> list[Allocation]:
        return [self._copied(each, None, 0) for each in allocations if self._is_received(each)]

    def _is_received(self, allocation: Allocation) -> bool:
        """Return whether it is a buffer of a stage, one for each micro-batch and not for each block."""
        return self._trace.stages > 1 and allocation.owner == COMMUNICATION and allocation.phase == SETUP

    def _with_repetitions(self, group: list[Allocation]) -> list[Allocation]:
        plain = [self._copied(each, None, 0) for each in group]
        found = _repetition([(each.size, each.stream) for each in group], self._blocks.count)
        if found is None:
            return plain
        begin, length = found
        end = begin + (self._chosen + 1) * length
        # What is freed before the next block's is made, as by an optimizer that goes from parameter to parameter, is
        # never there more than once.
        together = [
            index
            for index in range(end - length, end)
            if (freed := group[index].freed) is None or freed > group[index + length].born
        ]
        more = [
            replace(plain[index], module=self._renamed(group[index].module, None, copy))
            for copy in range(1, self._extra + 1)
            for index in together
        ]
        return [*plain[:end], *more, *plain[end:]]

    def _more_buckets(self, group: list[Allocation], per_block: int) -> list[Allocation]:
        """DDP's buckets are filled without regard to blocks: all of them together are as large as the gradients."""
        kept = [each for each in group if each.freed is None]
        if not kept or not per_block:
            return []
        largest = self._copied(max(kept, key=lambda each: each.size), None, 0)
        missing = per_block * self._extra
        whole, rest = divmod(missing, largest.size)
        return [replace(largest) for _ in range(whole)] + ([replace(largest, size=rest)] if rest else [])


def _tick(operation: Operation) -> int:
    return operation.tick


def _repetition(keys: Sequence[Hashable], times: int) -> tuple[int, int] | None:
    """Return begin and length of the longest sequence that stands so many times in a row."""
    total = len(keys)
    if total > _LONGEST_LIST:
        return None
    for length in range(total // times, 0, -1):
        run = 0
        for index in range(total - length):
            run = run + 1 if keys[index] == keys[index + length] else 0
            if run == (times - 1) * length:
                return index - run + 1, length
    return None
