"""The ledger of communication: calls and bytes of a step, by collective and by axis of the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .trace import Collective, Trace


@dataclass
class LedgerRow:
    """All collectives of one name over one axis in one step."""

    collective: str
    axis: str
    group: int
    """Ranks of a group."""
    calls: float
    size: float
    """Bytes of the whole: what a rank has after a gather, and before a reduce-scatter."""
    sent: float
    """Bytes that this rank sends, by the algorithms that need the fewest."""
    seconds: float | None = None
    hidden: float | None = None
    """Seconds of it that are behind computation; None for both if no devices were named."""


def ledger_of(trace: Trace) -> list[LedgerRow]:
    """Add up the collectives of the last step, those that send most first."""
    rows: dict[tuple[str, str, int], LedgerRow] = {}
    last = len(trace.steps) - 1
    for collective in trace.collectives:
        if collective.step != last:
            continue
        key = (collective.name, collective.axis, len(collective.ranks))
        row = rows.setdefault(key, LedgerRow(*key, calls=0, size=0, sent=0))
        row.calls += 1
        row.size += collective.size
        row.sent += sent_by(collective)
    return sorted(rows.values(), key=lambda row: -row.sent)


def sent_by(collective: Collective) -> float:
    """Return the bytes that one rank of a group sends."""
    ranks = len(collective.ranks)
    if ranks < 2 and collective.name not in ("send", "recv"):
        return 0.0
    share = (ranks - 1) / ranks if ranks else 0.0
    factors = {"all_reduce": 2 * share, "send": 1.0, "recv": 0.0, "broadcast": 1.0, "reduce": 1.0, "barrier": 0.0}
    return collective.size * factors.get(collective.name, share)


def extrapolated_ledger(a: Sequence[LedgerRow], b: Sequence[LedgerRow], factor: float) -> list[LedgerRow]:
    """Return the ledger at a point of the line from `a` (factor 0) to `b` (factor 1)."""
    fewer = {(row.collective, row.axis, row.group): row for row in a}
    rows = []
    for row in b:
        other = fewer.get((row.collective, row.axis, row.group))
        other = other or replace(row, calls=0, size=0, sent=0, seconds=row.seconds and 0.0, hidden=row.hidden and 0.0)
        rows.append(
            replace(
                row,
                calls=other.calls + factor * (row.calls - other.calls),
                size=other.size + factor * (row.size - other.size),
                sent=other.sent + factor * (row.sent - other.sent),
                seconds=_between(other.seconds, row.seconds, factor),
                hidden=_between(other.hidden, row.hidden, factor),
            )
        )
    return sorted(rows, key=lambda row: -row.sent)


def _between(a: float | None, b: float | None, factor: float) -> float | None:
    return None if a is None or b is None else max(0.0, a + factor * (b - a))


def timed(rows: Sequence[LedgerRow], seconds: Mapping[str, float], exposed: Mapping[str, float]) -> list[LedgerRow]:
    """Add the seconds of a `Timing`: its `communication` and its `exposed`, by collective and axis."""
    found = []
    for row in rows:
        key = f"{row.collective} {row.axis}"
        took = seconds.get(key, 0.0)
        found.append(replace(row, seconds=took, hidden=max(0.0, took - exposed.get(key, 0.0))))
    return found
