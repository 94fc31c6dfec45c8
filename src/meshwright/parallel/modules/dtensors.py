"""Convert between DTensors and full tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...precision.quantized import is_composed, is_pending, with_parts
from ...runtime.collectives.operations import mesh_of, whole

__all__ = ["any_dtensor", "distribute_like", "dtensor_like", "gathered", "local", "mesh_of", "num_shards", "whole"]


def local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, or a plain tensor itself."""
    return tensor if mesh_of(tensor) is None else tensor.to_local()  # type: ignore[attr-defined]


def any_dtensor(tensors: Iterable[Tensor]) -> bool:
    """Return whether any of these is a DTensor."""
    return any(mesh_of(tensor) is not None for tensor in tensors)


def num_shards(tensor: Tensor) -> int:
    """Return the number of processes that the rows of a tensor are divided over."""
    spread: Any = tensor
    if mesh_of(tensor) is None:
        return 1
    axes = zip(spread.device_mesh.shape, spread.placements, strict=True)
    return math.prod(size for size, place in axes if place.is_shard(0))


def gathered(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Gather a state on rank 0. Collective; the other ranks get None for every DTensor.

    Tensors are gathered one by one, so that only rank 0 ever holds more than one of them.
    """
    result = dict(state)
    for name, value in state.items():
        if isinstance(value, Mapping):
            result[name] = gathered(value)
        elif isinstance(value, Tensor) and mesh_of(value) is not None:
            full = _complete(whole(value))
            result[name] = full.cpu() if dist.get_rank() == 0 else None
    return result


def _complete(tensor: Tensor) -> Tensor:
    """Wait for the tensors inside a composed one that were gathered."""
    if not is_composed(tensor):
        return tensor
    return with_parts(tensor, lambda part: part.wait() if is_pending(part) else part)  # type: ignore[attr-defined]


def dtensor_like(tensor: Tensor, own: Tensor) -> Tensor:
    """Return a DTensor with the spec of `tensor` and the local shard `own`."""
    if mesh_of(tensor) is None:
        return own
    from torch.distributed.tensor import DTensor

    spread: Any = tensor
    return DTensor(own, spread._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def distribute_like(value: Tensor, like: Tensor) -> Tensor:
    """Distribute a full tensor with the placements of `like`. Every process must hold the full tensor."""
    if mesh_of(like) is None or mesh_of(value) is not None:
        return value
    from torch.distributed.tensor import distribute_tensor

    spread: Any = like
    if is_composed(value):
        return dtensor_like(like, _own_part(value, spread))
    return distribute_tensor(value.to(like.device), spread.device_mesh, spread.placements, src_data_rank=None)


def _own_part(value: Tensor, like: Any) -> Tensor:
    """Return this process's rows of a composed tensor, which `distribute_tensor` cannot split."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    if tuple(shape[1:]) != tuple(like.shape[1:]):
        raise ValueError(f"{type(value).__name__} can be split along its rows only, not by {like.placements}.")
    return with_parts(value[offset[0] : offset[0] + shape[0]], lambda part: part.to(like.device, copy=True))
