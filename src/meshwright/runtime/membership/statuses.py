"""The statuses of all members as one text, which does not grow with their number: nearly all are equal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import InvalidDataError
from ...untrusted import build, parse_json


def join(texts: Mapping[int, str]) -> str:
    """Join the statuses of ranks, each a JSON text: every status once, with the ranges of ranks that have it."""
    ranges: dict[str, list[list[int]]] = {}
    for rank, text in sorted(texts.items()):
        known = ranges.setdefault(text, [])
        if known and known[-1][1] == rank - 1:
            known[-1][1] = rank
        else:
            known.append([rank, rank])
    parsed = [(_status(text, found[0][0]), found) for text, found in ranges.items()]
    return json.dumps(parsed)


def split(text: str, members: Sequence[int]) -> dict[int, Any]:
    """Return the status of every member, in order; raise InvalidDataError if the text is not about exactly these."""
    what = "the statuses in the store of the run"
    parsed = parse_json(text, what)
    num_ranges = sum(len(part[1]) for part in parsed if _is_pair(part)) if isinstance(parsed, list) else 0
    if num_ranges > len(members):
        raise InvalidDataError(f"{what} are not of the members, {list(members)}")
    found = build(_Joined, {"statuses": parsed}, what).statuses
    lengths = [high - low + 1 for _, ranges in found for low, high in ranges]
    of_rank: dict[int, Any] = {}
    # Each rank has one status: a text that names more is not expanded.
    if all(length > 0 for length in lengths) and sum(lengths) == len(members):
        of_rank = {rank: status for status, ranges in found for low, high in ranges for rank in range(low, high + 1)}
    if set(of_rank) != set(members):
        raise InvalidDataError(f"{what} are not of the members, {list(members)}")
    return dict(sorted(of_rank.items()))


def _is_pair(part: Any) -> bool:
    return isinstance(part, list) and len(part) == 2 and isinstance(part[1], list)


@dataclass(frozen=True)
class _Joined:
    statuses: tuple[tuple[Any, tuple[tuple[int, int], ...]], ...]


def _status(text: str, rank: int) -> Any:
    return parse_json(text, f"the status of rank {rank} in the store of the run")
