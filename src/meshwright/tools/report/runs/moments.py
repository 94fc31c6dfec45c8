"""Read the step times per rank and phase that the watcher writes next to a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from ....errors import InvalidDataError
from ....untrusted import build, printable
from .lines import LATEST, LineError, newest_lines, parsed

FILE_NAME = "ranks.jsonl"
_TAIL = 1 << 19
_LONGEST = 1e15
_LARGEST = 1 << 53


@dataclass(frozen=True)
class Straggler:
    """The rank that makes the others wait, as the watcher found it."""

    rank: int
    phase: str
    text: str = ""


@dataclass(frozen=True)
class StepWindow:
    """The step times of one window, for the ranks in the file."""

    time: float
    step: int
    num_ranks: int
    phases: list[str]
    ranks: dict[int, list[float]]
    """Milliseconds per phase."""
    straggler: Straggler | None

    @classmethod
    def from_line(cls, line: bytes) -> StepWindow | None:
        """Parse a line; return None if it is incomplete."""
        try:
            read = build(_Line, _known(_Line, parsed(line)), "a line")
            slow = None if read.straggler is None else build(Straggler, _known(Straggler, read.straggler), "a line")
        except (LineError, InvalidDataError):
            return None
        ranks = {int(rank): [us / 1e3 for us in times] for rank, times in read.ranks.items()}
        return cls(read.time, read.step, read.of, [printable(phase, 40) for phase in read.phases], ranks, slow)

    @property
    def used(self) -> list[int]:
        """The phases that take a visible part of a step on any rank."""
        longest = max(map(sum, self.ranks.values()))
        return [index for index in range(len(self.phases)) if self._longest(index) > 0.001 * longest]

    def _longest(self, index: int) -> float:
        return max(times[index] for times in self.ranks.values())


@dataclass(frozen=True)
class _Line:
    """What a line says; newer versions may write more."""

    time: float
    step: int
    of: int
    phases: list[str]
    ranks: Mapping[str, list[float]]
    """Microseconds per phase."""
    straggler: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.time <= LATEST and 0 <= self.step < _LARGEST and 0 < self.of < _LARGEST and self.ranks):
            raise ValueError("a number is out of range")
        for rank, times in self.ranks.items():
            if not (rank.isascii() and rank.isdecimal() and len(rank) < 10) or len(times) != len(self.phases):
                raise ValueError("the times of a rank are incomplete")
            if not all(0 <= time <= _LONGEST for time in times):
                raise ValueError("a time is out of range")


def _known(kind: type[Any], record: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: record[field.name] for field in fields(kind) if field.name in record}


class RunEnd(NamedTuple):
    """What the end of the file says."""

    newest: StepWindow | None
    slow: StepWindow | None
    """The last one in which a rank was slow."""
    skipped: int
    """Number of lines that could not be read."""


def newest_windows(file: Path) -> RunEnd:
    """Return the last window, and the last one in which a rank was slow."""
    lines = newest_lines(file, _TAIL)
    windows = [window for line in lines if (window := StepWindow.from_line(line)) is not None]
    newest_first = windows[::-1]
    return RunEnd(
        newest=next(iter(newest_first), None),
        slow=next((window for window in newest_first if window.straggler), None),
        skipped=len(lines) - len(windows),
    )
