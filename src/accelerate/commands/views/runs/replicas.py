"""Read who left and who joined a run under `accelerate launch --survive`, from the file beside the run's log."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .reading import clean

FILE_NAME = "replicas.jsonl"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change of the members, and what it cost."""

    time: float
    kind: str
    """`left`, `joined`, `broken`, or `hangs` for a member that keeps the others waiting."""
    ranks: tuple[int, ...]
    reason: str
    replicas: int
    """How many train after it."""
    of: int
    absent_seconds: float | None = None
    """For a rank that joined: since it had left."""
    seconds: float | None = None
    """For how long training stood still; None if that is not known, or counted with a later change."""

    @property
    def text(self) -> str:
        """Who left and why, or who joined."""
        who = f"rank {', '.join(map(str, self.ranks))}"
        if self.kind == "joined":
            return f"{who} joined" + (f" after {duration(self.absent_seconds)}" if self.absent_seconds else "")
        if self.kind == "left" and not self.reason.startswith("rank"):
            return f"{who} left: {clean(self.reason)}"
        return clean(self.reason)


@dataclass(kw_only=True)
class Changes:
    """All changes of a run, and their total."""

    changes: list[Change] = field(default_factory=list)
    replacements: int = 0
    lost_seconds: float = 0.0
    of_seconds: float = 0.0

    @property
    def total(self) -> str:
        """How many processes were replaced, and the time that training stood still."""
        count = "1 replacement" if self.replacements == 1 else f"{self.replacements} replacements"
        return f"{count}, {self.lost_seconds:.1f} s lost of {duration(self.of_seconds)}"

    @property
    def present(self) -> str:
        """How many replicas train now."""
        return f"{self.changes[-1].replicas} of {self.changes[-1].of} replicas"


def read_changes(log: Path) -> Changes | None:
    """Return the changes of the run with this log; None if there were none, or it may not lose a process."""
    try:
        lines = log.with_name(FILE_NAME).read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return None
    found, by_number, left_at = Changes(), dict[int, int](), dict[int, float]()
    for line in lines:
        try:
            _apply(json.loads(line), found, by_number, left_at)
        except (ValueError, KeyError, TypeError, AttributeError):  # a crash can tear a line
            continue
    return found if found.changes else None


def _apply(record: dict[str, Any], found: Changes, by_number: dict[int, int], left_at: dict[int, float]) -> None:
    if total := record.get("total"):
        found.replacements, found.lost_seconds = int(total["replacements"]), float(total["seconds"])
        found.of_seconds = float(total["of_seconds"])
    elif "kind" in record:
        when, ranks = float(record["time"]), tuple(map(int, record["ranks"]))
        change = Change(
            time=when,
            kind=str(record["kind"]),
            ranks=ranks,
            reason=str(record["reason"]),
            replicas=int(record["replicas"]),
            of=int(record["of"]),
        )
        if change.kind == "left":
            left_at.update(dict.fromkeys(ranks, when))
        elif change.kind == "joined" and ranks and ranks[0] in left_at:
            change = replace(change, absent_seconds=when - left_at[ranks[0]])
        if "event" in record:
            by_number[int(record["event"])] = len(found.changes)
        found.changes.append(change)
    else:
        place = by_number[int(record["event"])]
        found.changes[place] = replace(found.changes[place], seconds=float(record["seconds"]))


def duration(seconds: float) -> str:
    """Return a duration in the unit that suits it."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
