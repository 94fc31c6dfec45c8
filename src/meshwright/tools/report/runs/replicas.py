"""Read who left and who joined a run under `meshwright launch --survive`, from the file beside the run's log."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ....errors import InvalidDataError
from ....untrusted import build, printable
from .lines import LATEST, LineError, newest_lines, parsed

FILE_NAME = "replicas.jsonl"
_TAIL = 1 << 22
_LARGEST = 1 << 53
_LONGEST_REASON = 1000


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
        who = printable(f"rank {', '.join(map(str, self.ranks))}")
        if self.kind == "joined":
            return f"{who} joined" + (f" after {duration(self.absent_seconds)}" if self.absent_seconds else "")
        if self.kind == "left" and not self.reason.startswith("rank"):
            return f"{who} left: {printable(self.reason, _LONGEST_REASON)}"
        return printable(self.reason, _LONGEST_REASON)


@dataclass(kw_only=True)
class Changes:
    """All changes of a run, and their total."""

    changes: list[Change] = field(default_factory=list)
    replacements: int = 0
    lost_seconds: float = 0.0
    of_seconds: float = 0.0
    skipped: int = 0
    """Number of lines that could not be read."""

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
    found, by_number, left_at = Changes(), dict[int, int](), dict[int, float]()
    for line in newest_lines(log.with_name(FILE_NAME), _TAIL):
        try:
            _apply(parsed(line), found, by_number, left_at)
        except (LineError, InvalidDataError):  # a crash can tear a line
            found.skipped += 1
    return found if found.changes else None


@dataclass(frozen=True, kw_only=True)
class _Event:
    time: float
    kind: Literal["left", "joined", "broken", "hangs"]
    ranks: list[int]
    reason: str
    replicas: int
    of: int
    event: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.time <= LATEST or not all(0 <= n < _LARGEST for n in (self.replicas, self.of, *self.ranks)):
            raise ValueError("a number is out of range")


@dataclass(frozen=True, kw_only=True)
class _Total:
    replacements: int
    seconds: float
    of_seconds: float
    time: float = 0.0

    def __post_init__(self) -> None:
        _check_seconds(self.seconds, self.of_seconds)


@dataclass(frozen=True, kw_only=True)
class _Cost:
    event: int
    seconds: float

    def __post_init__(self) -> None:
        _check_seconds(self.seconds)


def _check_seconds(*seconds: float) -> None:
    if not all(abs(number) <= LATEST for number in seconds):
        raise ValueError("a number is out of range")


def _apply(record: dict[str, Any], found: Changes, by_number: dict[int, int], left_at: dict[int, float]) -> None:
    if "total" in record:
        total = build(_Total, record["total"], "a line")
        found.replacements, found.lost_seconds, found.of_seconds = total.replacements, total.seconds, total.of_seconds
    elif "kind" in record:
        event = build(_Event, record, "a line")
        ranks = tuple(event.ranks)
        change = Change(
            time=event.time, kind=event.kind, ranks=ranks, reason=event.reason, replicas=event.replicas, of=event.of
        )
        if change.kind == "left":
            left_at.update(dict.fromkeys(ranks, event.time))
        elif change.kind == "joined" and ranks and ranks[0] in left_at:
            change = replace(change, absent_seconds=event.time - left_at[ranks[0]])
        if event.event is not None:
            by_number[event.event] = len(found.changes)
        found.changes.append(change)
    else:
        cost = build(_Cost, record, "a line")
        if cost.event not in by_number:
            raise LineError
        place = by_number[cost.event]
        found.changes[place] = replace(found.changes[place], seconds=cost.seconds)


def duration(seconds: float) -> str:
    """Return a duration in the unit that suits it."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
