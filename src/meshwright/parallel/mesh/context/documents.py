"""Documents and padding of a batch, and the pieces of attention that follow from them.

[Note: pieces] A query attends to keys of its own document within its reach. The queries of a process are some runs of
adjacent positions. Each run is one call of attention with just the keys that it can see, so that the work is
proportional to the squares of the documents' lengths, not to that of the sequence. A piece has a mask only where its
queries see different keys and the kernel's own causal mask does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

_MIN_ROWS = 128
"""Windows smaller than this do not divide runs further."""


class Reach(NamedTuple):
    """How many positions before and after itself a query attends to; None stands for all."""

    before: int | None = None
    after: int | None = None

    def sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return which of the keys each query attends to, both by position."""
        steps = keys - queries
        seen = torch.ones_like(steps, dtype=torch.bool)
        if self.before is not None:
            seen &= steps >= -self.before
        if self.after is not None:
            seen &= steps <= self.after
        return seen


CAUSAL = Reach(after=0)


class Piece(NamedTuple):
    """One call of attention: queries and keys by position, and which of them belong together."""

    queries: slice
    keys: slice
    mask: Tensor | None
    is_causal: bool
    """Whether the kernel's own causal mask applies, which aligns the first query with the first key."""


Plan = list[tuple[slice, list[Piece]]]
"""For some sequences of a batch, their pieces."""


@dataclass(frozen=True)
class Row:
    """The documents of one sequence, and its padding."""

    starts: tuple[int, ...]
    """The first position of each document."""
    real: Tensor | None = None
    """Which keys are not padding, if some are."""


@dataclass
class Documents:
    """The documents and the padding of all sequences of a batch, in the order of the whole sequences."""

    length: int
    rows: Sequence[Row]
    """One for each sequence, or one for all of them."""
    _plans: dict[object, Plan] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Whether every sequence is one document without padding."""
        return all(row.starts == (0,) and row.real is None for row in self.rows)

    @property
    def has_several(self) -> bool:
        """Whether a sequence has more than one document."""
        return any(len(row.starts) > 1 for row in self.rows)

    @cached_property
    def joined(self) -> Documents:
        """The same sequences as one document each, with their padding."""
        return Documents(self.length, [Row((0,), row.real) for row in self.rows])

    def plan(self, own: Tensor | None, reach: Reach, device: torch.device) -> Plan:
        """Return the pieces for the queries at these positions, [sequences or 1, count]; None stands for all."""
        key = (None if own is None else id(own), reach, device)
        if key not in self._plans:
            self._plans[key] = self._new_plan(own, reach, device)
        return self._plans[key]

    def _new_plan(self, own: Tensor | None, reach: Reach, device: torch.device) -> Plan:
        queries = torch.arange(self.length)[None] if own is None else own
        count = max(len(self.rows), len(queries))
        plan: Plan = []
        for index in range(count):
            row = self.rows[index % len(self.rows)]
            pieces = list(pieces_of(queries[index % len(queries)], row, self.length, reach, device))
            plan.append((slice(index, index + 1) if count > 1 else slice(None), pieces))
        return plan


def documents_of(positions: Tensor | None, real: Tensor | None, length: int) -> Documents:
    """Return the documents, which begin where positions [batch, length] do not follow the last, and the padding."""
    starts = [(0,)]
    if positions is not None:
        breaks = positions[:, 1:] != positions[:, :-1] + 1
        starts = [(0, *(row.nonzero().flatten() + 1).tolist()) for row in breaks.cpu()]
    kept: list[Tensor | None] = [None]
    if real is not None:
        real = real.bool().cpu()
        kept = [None if bool(row.all()) else row for row in real]
    if len(set(starts)) == 1 and all(row is None for row in kept):
        starts, kept = starts[:1], kept[:1]
    count = max(len(starts), len(kept))
    return Documents(length, [Row(starts[i % len(starts)], kept[i % len(kept)]) for i in range(count)])


def pieces_of(
    queries: Tensor, row: Row, length: int, reach: Reach, device: torch.device | None = None
) -> Iterator[Piece]:
    """Yield the pieces for queries at increasing positions of one sequence. See [Note: pieces]."""
    bounds = (*row.starts, length)
    document = torch.bucketize(queries, torch.tensor(row.starts), right=True) - 1
    breaks = (queries[1:] != queries[:-1] + 1) | (document[1:] != document[:-1])
    edges = [0, *(breaks.nonzero().flatten() + 1).tolist(), len(queries)]
    longest = length if reach.before is None else max(reach.before + 1, _MIN_ROWS)
    for begin, end in pairwise(edges):
        own, first = int(document[begin]), int(queries[begin])
        for at in range(begin, end, longest):
            run = range(first + at - begin, first + min(end, at + longest) - begin)
            piece = _piece(run, bounds[own], bounds[own + 1], row.real, reach, at, device)
            if piece is not None:
                yield piece


def _piece(
    run: range, start: int, stop: int, real: Tensor | None, reach: Reach, at: int, device: torch.device | None
) -> Piece | None:
    """Return the piece of a run of queries in a document, or None if they see no key; `at` is where the run is."""
    before, after = (stop if steps is None else steps for steps in reach)  # as far as a document can be
    keys = range(max(start, run[0] - before), min(stop, run[-1] + after + 1))
    holes = None
    if real is not None:
        keys, holes = _without_padding(keys, real)
    seeing = range(max(run.start, keys.start - after), min(run.stop, keys.stop + before))
    if not keys or not seeing:
        return None
    queries = slice(at + seeing.start - run.start, at + seeing.stop - run.start)
    sees_all_before = seeing[-1] - before <= keys.start
    sees_all_after = seeing.start + after >= keys[-1]
    is_square = after == 0 and seeing == keys
    if holes is None and sees_all_before and (sees_all_after or is_square):
        return Piece(queries, slice(keys.start, keys.stop), None, not sees_all_after)
    mask = reach.sees(torch.arange(seeing.start, seeing.stop)[:, None], torch.arange(keys.start, keys.stop))
    if holes is not None:
        mask &= holes
    return Piece(queries, slice(keys.start, keys.stop), mask.to(device), False)


def _without_padding(keys: range, real: Tensor) -> tuple[range, Tensor | None]:
    """Return the keys from the first to the last that is real, and which of them are, if not all."""
    kept = real[keys.start : keys.stop].nonzero().flatten()
    if not len(kept):
        return range(0), None
    keys = range(keys.start + int(kept[0]), keys.start + int(kept[-1]) + 1)
    holes = real[keys.start : keys.stop]
    return keys, None if bool(holes.all()) else holes
