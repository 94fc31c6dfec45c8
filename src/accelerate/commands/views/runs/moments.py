"""Read the step times per rank and phase that the watcher writes next to a run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .reading import clean

FILE_NAME = "ranks.jsonl"
_TAIL = 1 << 19


@dataclass(frozen=True)
class StepWindow:
    """The step times of one window, for the ranks in the file."""

    time: float
    step: int
    num_ranks: int
    phases: list[str]
    ranks: dict[int, list[float]]
    """Milliseconds per phase."""
    straggler: dict[str, Any] | None

    @classmethod
    def from_line(cls, line: bytes) -> StepWindow | None:
        """Parse a line; return None if it is incomplete."""
        try:
            record = json.loads(line)
            ranks = {int(rank): [float(us) / 1e3 for us in times] for rank, times in record["ranks"].items()}
            phases = [clean(str(phase)) for phase in record["phases"]]
            straggler = record.get("straggler")
            slow = straggler if isinstance(straggler, dict) else None
            if not ranks or any(len(times) != len(phases) for times in ranks.values()):
                return None
            return cls(float(record["time"]), int(record["step"]), int(record["of"]), phases, ranks, slow)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    @property
    def used(self) -> list[int]:
        """The phases that take a visible part of a step on any rank."""
        longest = max(map(sum, self.ranks.values()))
        return [index for index in range(len(self.phases)) if self._longest(index) > 0.001 * longest]

    def _longest(self, index: int) -> float:
        return max(times[index] for times in self.ranks.values())


def newest_windows(file: Path) -> tuple[StepWindow | None, StepWindow | None]:
    """Return the last window, and the last one in which a rank was slow."""
    try:
        with file.open("rb") as lines:
            size = lines.seek(0, 2)
            lines.seek(max(0, size - _TAIL))
            tail = lines.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return None, None
    windows = [window for line in tail if (window := StepWindow.from_line(line)) is not None]
    newest_first = windows[::-1]
    return next(iter(newest_first), None), next((window for window in newest_first if window.straggler), None)
