"""Parts of tensors that ranks hold are put together again."""

from __future__ import annotations

import torch

from meshwright.tools.verify.comparing.layouts import TensorPart, joined

WHOLE = torch.arange(2 * 8 * 6).view(2, 8, 6)


def part(tensor: torch.Tensor, split: int = 0, positions: list[int] | None = None) -> TensorPart:
    return TensorPart(tensor=tensor, split=split, positions=None if positions is None else torch.tensor(positions))


def test_copies_stay_copies() -> None:
    found = joined([part(WHOLE), part(WHOLE + 1, split=1)], WHOLE.shape)
    assert found is not None
    assert [copy.equal(WHOLE) for copy in found] == [True, False]


def test_columns_of_split_layers_are_joined() -> None:
    found = joined([part(WHOLE[..., 3:], split=1), part(WHOLE[..., :3])], WHOLE.shape)
    assert found is not None
    assert len(found) == 1
    assert found[0].equal(WHOLE)


def test_positions_of_divided_sequences_are_joined_and_then_columns() -> None:
    front_and_back, middle = [0, 1, 6, 7], [2, 3, 4, 5]
    parts = [
        part(WHOLE[:, positions, columns], split=split, positions=positions)
        for positions in (front_and_back, middle)
        for split, columns in enumerate((slice(0, 3), slice(3, 6)))
    ]
    found = joined(parts, WHOLE.shape)
    assert found is not None
    assert found[0].equal(WHOLE)


def test_parts_that_do_not_fit_make_nothing() -> None:
    assert joined([part(WHOLE[:, :5])], WHOLE.shape) is None
    assert joined([part(WHOLE[:1, :, :3]), part(WHOLE[:1, :, 3:], split=1)], WHOLE.shape) is None
