"""The statuses of all members as one text, which does not grow with their number: nearly all are equal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def join(texts: Mapping[int, str]) -> str:
    """Join the statuses of ranks, each a JSON text: every status once, with the ranges of ranks that have it."""
    ranges: dict[str, list[list[int]]] = {}
    for rank, text in sorted(texts.items()):
        known = ranges.setdefault(text, [])
        if known and known[-1][1] == rank - 1:
            known[-1][1] = rank
        else:
            known.append([rank, rank])
    return json.dumps([[json.loads(text), found] for text, found in ranges.items()])


def split(text: str) -> dict[int, Any]:
    """Return the status of every rank, in order of ranks."""
    groups = [(status, range(low, high + 1)) for status, ranges in json.loads(text) for low, high in ranges]
    return {rank: status for status, ranks in sorted(groups, key=lambda group: group[1][0]) for rank in ranks}
