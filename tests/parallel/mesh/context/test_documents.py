"""Pieces of attention cover exactly the queries and keys that belong together."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from meshwright.parallel.mesh.context.documents import CAUSAL, Reach, Row, documents_of, pieces_of
from meshwright.parallel.mesh.context.sharding import balanced


def places_of(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def dense(places: Tensor, real: Tensor | None, reach: Reach) -> Tensor:
    """Return which query sees which key, written down directly."""
    length = len(places)
    document = (places == 0).cumsum(0)
    query, key = torch.arange(length)[:, None], torch.arange(length)
    seen = document[:, None] == document
    if reach.before is not None:
        seen &= query - key <= reach.before
    if reach.after is not None:
        seen &= key - query <= reach.after
    return seen if real is None else seen & real


@pytest.mark.parametrize("reach", [CAUSAL, Reach(), Reach(4, 0), Reach(150, 0), Reach(3, 3)])
def test_pieces_are_the_mask(reach: Reach) -> None:
    generator = random.Random(0)
    for _ in range(25):
        lengths = [generator.randint(1, 180) for _ in range(generator.randint(1, 5))]
        places = places_of(lengths)
        real = None
        if generator.random() < 0.7:
            real = torch.ones(len(places), dtype=torch.bool)
            real[: generator.randint(0, len(places) // 2)] = False
            real[len(places) - generator.randint(0, len(places) // 2) :] = False
            if generator.random() < 0.3:
                real &= torch.rand(len(places)) < 0.8
        expected = dense(places, real, reach)
        starts = tuple((places == 0).nonzero().flatten().tolist())
        for rank in range(3):
            own = balanced(places[None], 3, rank).own[0] if len(places) >= 6 else torch.arange(len(places))
            found = torch.zeros(len(own), len(places), dtype=torch.bool)
            for queries, keys, mask, is_causal in pieces_of(own, Row(starts, real), len(places), reach):
                part = torch.ones(queries.stop - queries.start, keys.stop - keys.start, dtype=torch.bool)
                found[queries, keys] = part.tril() if is_causal else part if mask is None else mask
            assert torch.equal(found, expected[own])


def test_work_is_proportional_to_the_documents_not_to_the_sequence() -> None:
    places = places_of([100] * 20)
    computed = 0
    for rank in range(4):
        own = balanced(places[None], 4, rank).own[0]
        for queries, keys, _, _ in pieces_of(own, Row(tuple(range(0, 2000, 100))), 2000, CAUSAL):
            computed += (queries.stop - queries.start) * (keys.stop - keys.start)
    assert computed < 20 * 100 * 100


def test_documents_are_read_from_positions_and_padding() -> None:
    positions = torch.cat([places_of([3, 5]), places_of([8])]).view(2, 8)
    found = documents_of(positions, None, 8)
    assert [row.starts for row in found.rows] == [(0, 3), (0,)]
    assert documents_of(positions[1:], torch.ones(1, 8), 8).is_plain
    padded = documents_of(None, torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]), 4)
    assert not padded.is_plain
    assert padded.rows[1].real is None
