"""Which positions processes get: each once, in equal numbers, with equal work."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from meshwright.parallel.mesh.context.sharding import balanced, contiguous, head_tail, positions_among
from tests.sizes import sized


def random_packing(generator: random.Random, length: int) -> list[int]:
    places: list[int] = []
    while len(places) < length:
        size = min(length - len(places), max(1, int(generator.lognormvariate(5, 1.2))))
        places += range(size)
    return places


@pytest.mark.parametrize("size", [2, 4, 8])
def test_random_packings_give_every_process_the_same_work(size: int) -> None:
    generator = random.Random(size)
    worst = 0.0
    for trial in range(sized(gate=12, nightly=100)):
        length = generator.choice([512, 1000, 2267, 4096, 8191])
        places = torch.tensor([random_packing(generator, length) for _ in range(1 + trial % 3)])
        shares = [balanced(places, size, rank) for rank in range(size)]
        assert shares[0].order.sort(1).values.equal(torch.arange(length).expand(len(places), -1))
        assert max(shares[0].sizes) - min(shares[0].sizes) <= 1
        work = [int((places.gather(1, share.own) + 1).sum()) for share in shares]
        worst = max(worst, max(work) * size / sum(work) - 1)
    assert worst <= 0.05


def test_the_parts_are_the_sequence() -> None:
    whole = torch.randn(3, 24, 2)
    places = torch.tensor([random_packing(random.Random(row), 24) for row in range(3)])
    for make in (contiguous, head_tail):
        shares = [make(24, 4, rank) for rank in range(4)]
        joined = torch.cat([share.part_of(whole, 1) for share in shares], 1)
        assert torch.equal(joined[:, shares[0].inverse[0]], whole)
        assert all(bool((share.own[:, 1:] > share.own[:, :-1]).all()) for share in shares)
    shares = [balanced(places, 4, rank) for rank in range(4)]
    joined = torch.cat([share.part_of(whole, 1) for share in shares], 1)
    restored = torch.take_along_dim(joined, shares[0].inverse[..., None], 1)
    assert torch.equal(restored, whole)


def test_documents_are_recognised_by_positions_that_start_again() -> None:
    tokens = torch.tensor([[5, 3, 9, 1, 2, 7]])
    packed = torch.tensor([[0, 1, 2, 0, 1, 2]])

    def found(*buffers: Tensor) -> Tensor | None:
        return positions_among(buffers, [buffer.dim() - 1 for buffer in buffers])

    assert found(tokens, torch.arange(6)[None], torch.ones(1, 6, dtype=torch.long)) is None
    assert torch.equal(found(tokens, packed), packed)  # type: ignore[arg-type]
    rows = torch.cat([packed, torch.arange(6)[None]])
    assert found(tokens.repeat(2, 1), rows) is not None
    assert found(torch.arange(6), rows) is None  # one buffer for all sequences: they are divided alike
