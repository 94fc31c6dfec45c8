"""What each rank writes down of the first steps, and what a comparison of all of them shows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any

_TOLERANCE = 1e-4
"""Relative difference of norms; devices of several kinds may round otherwise."""

Place = tuple[str, int]
"""A file and a line."""


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A mistake: where it is, what happens, and what to do."""

    place: Place
    text: str
    ranks: tuple[int, ...] = ()


@dataclass(kw_only=True)
class Copies:
    """Tensors of which several ranks should hold the same values."""

    ranks: list[int]
    what: str
    """Such as "gradients of SGD"."""
    remedy: str
    place: Place
    names: list[str] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)


@dataclass(kw_only=True)
class Record:
    """What one rank writes down for the others."""

    copies: dict[str, Copies] = field(default_factory=dict)
    data_rank: int = 0
    """Ranks with the same one share their samples by design."""
    inputs: list[int | None] = field(default_factory=list)
    """One number for what models were given in each step; None where it is not known."""
    place_of_inputs: Place | None = None
    lengths: list[tuple[int | None, Place]] = field(default_factory=list)
    """Batches of each prepared loader, and the line that prepared it."""

    def as_text(self) -> str:
        """Return the record as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> Record:
        """Read what another rank of this run has written."""
        known: dict[str, Any] = json.loads(text)
        copies = {key: Copies(**{**each, "place": tuple(each["place"])}) for key, each in known.pop("copies").items()}
        lengths = [(length, (place[0], place[1])) for length, place in known.pop("lengths")]
        place = known.pop("place_of_inputs")
        return cls(copies=copies, lengths=lengths, place_of_inputs=tuple(place) if place else None, **known)


def compare(records: dict[int, Record]) -> list[Mistake]:
    """Return what the records of several ranks show together."""
    return [*_different_copies(records), *_same_samples(records), *_different_lengths(records)]


def _different_copies(records: dict[int, Record]) -> Iterator[Mistake]:
    seen: set[str] = set()
    for rank, record in records.items():
        for key, mine in record.copies.items():
            group = key.rpartition("/")[0]  # values and gradients of the same tensors are one finding
            others = {r: records[r].copies.get(key) for r in mine.ranks if r in records and r != rank}
            for other, theirs in others.items():
                if group in seen or theirs is None or theirs.names != mine.names or theirs.ranks != mine.ranks:
                    continue
                odd = [name for name, a, b in zip(mine.names, mine.norms, theirs.norms, strict=True) if _differ(a, b)]
                if odd:
                    seen.add(group)
                    yield Mistake(
                        place=mine.place,
                        text=f"Ranks {rank} and {other} have different {mine.what}: {_some(odd, len(mine.names))}. "
                        f"{mine.remedy}",
                        ranks=(rank, other),
                    )


def _same_samples(records: dict[int, Record]) -> Iterator[Mistake]:
    for (rank, mine), (other, theirs) in combinations(records.items(), 2):
        known = [number for number in mine.inputs if number is not None]
        varies = len(set(known)) > 1  # a batch that never changes is a benchmark, or a model that is overfitted
        if not varies or len(known) < len(mine.inputs) or mine.place_of_inputs is None:
            continue
        if mine.data_rank != theirs.data_rank and mine.inputs == theirs.inputs:
            yield Mistake(
                place=mine.place_of_inputs,
                text=f"Ranks {rank} and {other} computed on the same batches in the first {len(known)} steps. Give the "
                "loader to prepare(), which lets each rank read its own samples; draw random data from a seed of the "
                "rank.",
                ranks=(rank, other),
            )
            return


def _different_lengths(records: dict[int, Record]) -> Iterator[Mistake]:
    for loaders in zip(*(record.lengths for record in records.values()), strict=False):
        lengths = dict(zip(records, (length for length, _ in loaders), strict=True))
        known = {rank: length for rank, length in lengths.items() if length is not None}
        if len(set(known.values())) > 1:
            low, high = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
            yield Mistake(
                place=loaders[0][1],
                text=f"The prepared loader has {known[low]} batches on rank {low} and {known[high]} on rank {high}: "
                "one will wait for the other. Give all of the data to every rank, in batches of one size.",
                ranks=(low, high),
            )


def _differ(a: float | None, b: float | None) -> bool:
    if a is None or b is None or a != a or b != b:  # not known, or NaN, which is a finding of its own
        return False
    return abs(a - b) > _TOLERANCE * max(abs(a), abs(b))


def _some(names: Sequence[str], of: int) -> str:
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''} ({len(names)} of {of})"
