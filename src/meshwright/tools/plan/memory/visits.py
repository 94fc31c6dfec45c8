"""Find where each pass over the repeated blocks of a model visits each of them."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from ..trace import BACKWARD, FORWARD, Trace
from .lifetimes import block_of


class CannotExpandError(ValueError):
    """Report a trace whose passes do not visit its blocks one after the other.

    Nothing is to be done: memory is then extrapolated from the traces of two depths.
    """


@dataclass
class Visit:
    """The ticks of one block in one pass."""

    begin: int
    end: int
    block: int
    sweep: int


@dataclass
class BlockSweep:
    """One pass over all blocks."""

    phase: str
    number: int
    visits: dict[int, Visit]
    """In the order of time."""

    @property
    def ascending(self) -> bool:
        """Whether it begins with the first block."""
        return next(iter(self.visits)) == 0

    def is_over(self, phase: str, block: int, count: int) -> bool:
        """Return whether an operation belongs to the next pass."""
        return phase != self.phase or (len(self.visits) == count and block != next(reversed(self.visits)))

    def add(self, block: int, begin: int, end: int) -> None:
        """Add an operation."""
        last = next(reversed(self.visits), None)
        if block not in self.visits:
            if last is not None:
                self.visits[last].end = begin
            self.visits[block] = Visit(begin, end, block, self.number)
        elif block == last:
            self.visits[block].end = end

    def check(self, count: int) -> None:
        """Refuse a pass that does not go through all blocks in order."""
        order = list(self.visits)
        if len(order) < count:
            raise CannotExpandError(f"a {self.phase} pass visits {len(order)} of {count} blocks.")
        if order not in (list(range(count)), list(reversed(range(count)))):
            raise CannotExpandError(f"a {self.phase} pass visits the blocks in the order {order}.")


@dataclass(frozen=True)
class Blocks:
    """The repeated blocks of a model: `count` times `period` of them."""

    family: str
    """Name of the list that holds them."""
    first: int
    """The number of the first in this list."""
    count: int
    period: int

    @classmethod
    def of(cls, trace: Trace, period: int) -> Blocks:
        """Find the blocks of a trace."""
        numbers: dict[str, set[int]] = {}
        for module in {operation.module for operation in trace.operations}:
            name = block_of(module)
            if name is not None:
                numbers.setdefault(name.rpartition(".")[0], set()).add(int(name.rpartition(".")[2]))
        if not numbers:
            raise CannotExpandError("no operation is in a numbered block.")
        shortened = trace.blocks // trace.stages
        family, found = max(numbers.items(), key=lambda item: (len(item[1]) == shortened, len(item[1]), item[0]))
        if any(len(others) >= len(found) for name, others in numbers.items() if name != family):
            raise CannotExpandError(f"{', '.join(sorted(numbers))} are several lists of blocks.")
        count = len(found) // period
        if count < 3 or len(found) % period or max(found) - min(found) + 1 != len(found):
            raise CannotExpandError(f"the numbers of the blocks in {family!r} are {sorted(found)}.")
        return cls(family, min(found), count, period)

    def number(self, module: str) -> int | None:
        """Return the block that a module is in, counted from 0."""
        name = block_of(module)
        if name is None or name.rpartition(".")[0] != self.family:
            return None
        return (int(name.rpartition(".")[2]) - self.first) // self.period

    def sweeps(self, trace: Trace) -> list[BlockSweep]:
        """Return the passes over the blocks."""
        sweeps: list[BlockSweep] = []
        starts = sorted({o.tick for o in trace.operations} | {a.born for a in trace.allocations})
        for operation in trace.operations:
            block = self.number(operation.module) if operation.phase in (FORWARD, BACKWARD) else None
            if block is None:
                continue
            if not sweeps or sweeps[-1].is_over(operation.phase, block, self.count):
                sweeps.append(BlockSweep(operation.phase, len(sweeps), {}))
            # What is freed before anything else begins belongs to this operation.
            after = bisect_right(starts, operation.tick)
            sweeps[-1].add(block, operation.tick, starts[after] if after < len(starts) else operation.tick + 1)
        for sweep in sweeps:
            sweep.check(self.count)
        if not sweeps:
            raise CannotExpandError("no pass visits the blocks.")
        return sweeps
