"""From a tensor that is spread over processes to a whole one, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

# torch.distributed.tensor takes long to import, so a DTensor is recognised by what it has.


def mesh_of(tensor: Tensor) -> Any:
    """Return the mesh a tensor is spread over, or None where it is whole."""
    return getattr(tensor, "device_mesh", None)


def local(tensor: Tensor) -> Tensor:
    """Return this process's part, or the tensor itself where it is whole."""
    return tensor if mesh_of(tensor) is None else tensor.to_local()  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor on every process; all of its mesh call it."""
    return tensor if mesh_of(tensor) is None else tensor.full_tensor()  # type: ignore[attr-defined]


def is_spread(tensors: Iterable[Tensor]) -> bool:
    """Tell whether any of these lives on more than one process."""
    return any(mesh_of(tensor) is not None for tensor in tensors)


def gathered(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a state with whole tensors on the first process; the others take part, and keep only what is whole anyway.

    One tensor after the other, so that no process but the first ever holds more than one of them.
    """
    result = dict(state)
    for name, value in state.items():
        if isinstance(value, Mapping):
            result[name] = gathered(value)
        elif isinstance(value, Tensor) and mesh_of(value) is not None:
            full = whole(value)
            result[name] = full.cpu() if dist.get_rank() == 0 else None
    return result


def part_of(tensor: Tensor, own: Tensor) -> Tensor:
    """Return a tensor that is spread like this one, of which this process holds `own`."""
    if mesh_of(tensor) is None:
        return own
    from torch.distributed.tensor import DTensor

    spread: Any = tensor
    return DTensor(own, spread._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def spread_like(value: Tensor, like: Tensor) -> Tensor:
    """Return this process's part of a whole tensor, as `like` is spread; every process has the whole one already."""
    if mesh_of(like) is None or mesh_of(value) is not None:
        return value
    from torch.distributed.tensor import distribute_tensor

    spread: Any = like
    return distribute_tensor(value.to(like.device), spread.device_mesh, spread.placements, src_data_rank=None)
