"""Results of operations whose shapes depend on data, at their upper bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

_aten = torch.ops.aten


def _nonzero(tensor: Tensor) -> Tensor:
    return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)


def _masked_select(tensor: Tensor, mask: Tensor) -> Tensor:
    return tensor.new_empty((math.prod(np.broadcast_shapes(tensor.shape, mask.shape)),))


def _unique(tensor: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    counts = tensor.new_empty((tensor.numel(),), dtype=torch.int64)
    return tensor.new_empty((tensor.numel(),)), tensor.new_empty(tensor.shape, dtype=torch.int64), counts


def _repeat_interleave(repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    return repeats.new_empty((repeats.numel() if output_size is None else output_size,), dtype=torch.int64)


def _bincount(tensor: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    return tensor.new_empty((max(1, minlength),), dtype=torch.int64 if weights is None else weights.dtype)


def _index(tensor: Tensor, indices: list[Tensor | None]) -> Any:
    """Index with masks replaced by the positions of all of their elements."""
    positions: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            positions += [index.new_empty((index.numel(),), dtype=torch.int64) for _ in range(index.dim())]
        else:
            positions.append(index)
    return _aten.index.Tensor(tensor, positions)


def _equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape


ANSWERS: dict[Any, Callable[..., Any] | None] = {
    _aten._local_scalar_dense.default: None,
    _aten._pin_memory.default: None,
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
    _aten._unique2.default: _unique,
    _aten.equal.default: _equal,
    _aten.index.Tensor: _index,
    _aten.repeat_interleave.Tensor: _repeat_interleave,
    _aten.bincount.default: _bincount,
}
"""Operations whose results depend on data, and what makes a result of the largest shape that it can have."""
WORDS = {
    _aten._local_scalar_dense.default: "read a number of a tensor",
    _aten.index.Tensor: "chose elements by a mask",
    _aten.nonzero.default: "chose elements by a mask",
    _aten.masked_select.default: "chose elements by a mask",
    _aten._unique2.default: "computed unique elements",
    _aten.equal.default: "compared two tensors",
    _aten.repeat_interleave.Tensor: "repeated elements by a tensor of counts",
    _aten.bincount.default: "counted values of a tensor",
}
"""What a script did that needs such a result."""
