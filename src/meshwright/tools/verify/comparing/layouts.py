"""Put the parts of a tensor that several ranks hold together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TensorPart:
    """A tensor of one rank, or a part of it."""

    tensor: Tensor
    split: int
    """The rank's position along `tp`."""
    positions: Tensor | None
    """The positions of each sequence that the rank holds; None for all."""


def joined(parts: Sequence[TensorPart], target: torch.Size) -> list[Tensor] | None:
    """Return every copy of the whole tensor that the parts make; None where they do not fit together.

    Ranks that share sequences hold different positions; ranks that split layers hold the same tensor or equal parts of
    it along one dimension. Which dimension that is follows from the sizes.
    """
    by_split: dict[int, list[TensorPart]] = {}
    for part in parts:
        by_split.setdefault(part.split, []).append(part)
    whole_sequences = [_join_positions(by_split[split], target) for split in sorted(by_split)]
    tensors = [tensor for tensor in whole_sequences if tensor is not None]
    if len(tensors) < len(whole_sequences):
        return None
    if all(tensor.shape == target for tensor in tensors):
        return tensors
    dim = _split_dim(tensors, target)
    return None if dim is None else [torch.cat(tensors, dim)]


def _join_positions(parts: Sequence[TensorPart], target: torch.Size) -> Tensor | None:
    first = parts[0]
    if first.positions is None or len(parts) == 1:
        return first.tensor
    length = sum(len(part.positions) for part in parts if part.positions is not None)
    dims = [
        dim
        for dim, (own, full) in enumerate(zip(first.tensor.shape, target, strict=False))
        if full == length and own == len(first.positions)
    ]
    if first.tensor.dim() != len(target) or not dims:
        return first.tensor if first.tensor.shape == target else None
    shape = list(first.tensor.shape)
    shape[dims[0]] = length
    result = first.tensor.new_empty(shape)
    for part in parts:
        if part.positions is None or part.tensor.shape[dims[0]] != len(part.positions):
            return None
        result.index_copy_(dims[0], part.positions, part.tensor)
    return result


def _split_dim(tensors: Sequence[Tensor], target: torch.Size) -> int | None:
    shape = tensors[0].shape
    if len(shape) != len(target) or any(tensor.dim() != len(target) for tensor in tensors):
        return None
    different = [dim for dim in range(len(target)) if shape[dim] != target[dim]]
    if len(different) != 1 or sum(tensor.shape[different[0]] for tensor in tensors) != target[different[0]]:
        return None
    return different[0]
