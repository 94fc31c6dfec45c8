"""Open a process group of any size that connects to nobody, and read collectives from their operators."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, _resolve_process_group

COLLECTIVE_NAMESPACES = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}
_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "scatter_": "scatter",
    "gather_": "gather",
    "reduce_": "reduce",
    "send": "send",
    "recv_": "recv",
}


def open_groups_without_connections(rank: int, world_size: int) -> None:
    """Make `init_process_group` open a group whose collectives only have shapes, and answer questions about objects."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - it registers the backend

    plain_init, plain_new_group = dist.init_process_group, dist.new_group

    def init_process_group(backend: Any = None, **options: Any) -> None:
        plain_init("fake", store=HashStore(), rank=rank, world_size=world_size)

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **options: Any) -> Any:
        return plain_new_group(ranks, timeout, "fake", *args, **options)

    replacements: dict[str, Callable[..., Any]] = {
        "init_process_group": init_process_group,
        "new_group": new_group,
        "barrier": lambda *args, **kwargs: None,
        "monitored_barrier": lambda *args, **kwargs: None,
        "all_gather_object": _all_gather_object,
        "gather_object": _gather_object,
        "broadcast_object_list": lambda *args, **kwargs: None,
        "scatter_object_list": _scatter_object_list,
    }
    for name, function in replacements.items():
        setattr(dist, name, function)
        setattr(dist.distributed_c10d, name, function)


def _all_gather_object(objects: list[Any], obj: Any, group: Any = None) -> None:
    objects[:] = [copy.copy(obj) for _ in objects]


def _gather_object(obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
    if object_gather_list is not None:
        _all_gather_object(object_gather_list, obj)


def _scatter_object_list(outputs: list[Any], inputs: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
    if inputs:
        outputs[0] = inputs[dist.get_rank()]


def collective_of(function: Any, args: Any, kwargs: Any) -> tuple[str, tuple[int, ...]] | None:
    """Return the name of a collective and the global ranks of its group; for messages, both ranks."""
    operator = function._schema.name.rpartition("::")[2]
    name = _NAMES.get(operator)
    group = _group_of((*args, *kwargs.values()))
    if name is None or group is None:
        return None
    ranks = tuple(dist.get_process_group_ranks(group))
    if name in ("send", "recv"):
        peer = next(arg for arg in args if isinstance(arg, int))
        ranks = tuple(sorted({dist.get_rank(), ranks[peer]}))
    return name, ranks


def _group_of(args: tuple[Any, ...]) -> Any:
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(arg)
            except RuntimeError:  # the object is an operation of a reduction
                continue
        if isinstance(arg, dist.ProcessGroup):
            return arg
        if isinstance(arg, str) and arg not in ("sum", "avg", "max", "min", "product"):
            return _resolve_process_group(arg)  # type: ignore[arg-type]
    return None


def axes_of(ranks: tuple[int, ...], sizes: dict[str, int]) -> str:
    """Return the axes of a mesh, in row-major order, along which the ranks of a group differ."""
    if not sizes:
        return "world"
    coordinates = [coordinates_of(rank, tuple(sizes.values())) for rank in ranks]
    spanned = [name for axis, name in enumerate(sizes) if len({coordinate[axis] for coordinate in coordinates}) > 1]
    return " x ".join(spanned) or "one rank"


def coordinates_of(rank: int, sizes: tuple[int, ...]) -> list[int]:
    """Return the position of a rank along every axis, in row-major order."""
    result = []
    for size in reversed(sizes):
        result.append(rank % size)
        rank //= size
    return result[::-1]
