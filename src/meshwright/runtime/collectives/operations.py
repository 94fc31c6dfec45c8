"""Collectives over nested containers: gather, reduce, broadcast, pad.

Every operation is a no-op on a single process. In debug mode (`ACCELERATE_DEBUG_MODE=1`) the ranks first compare
their arguments, and a difference is an error that lists every rank instead of a hang or a corrupted result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast, get_args

import torch
import torch.distributed as dist

from ...errors import DistributedOperationException
from ...errors.callers import warn
from ..group.runtime import Runtime
from ..phases import waits_for_others
from .last_calls import record_call
from .nested import named_leaves, recursively_apply

F = TypeVar("F", bound=Callable[..., Any])
Reduction = Literal["mean", "sum", "max", "min", "none"]
_OPERATIONS = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}  # all others sum

# torch 2.13 renamed it and warns of the old name.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
"""torch's collective under its new name, or its old one, which torch 2.13 warns about."""
# Number formats that neither gloo nor NCCL knows: they are sent as bytes, and added in a wider one.
_SENT_AS_BYTES = frozenset(
    {torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2}
)
_ADDED_AS = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}


class CannotPadNestedTensorWarning(UserWarning):
    """Warn that a nested (jagged) tensor was not padded.

    `pad_across_processes` leaves it as it is. Turn it into a padded tensor first: `tensor.to_padded_tensor(value)`.
    """


def _describe(operation: str, data: Any, *, sizes: bool = True) -> str:
    """Describe a call so that ranks can compare their arguments: with the sizes of tensors, or without."""

    def describe(name: str, leaf: Any) -> str:
        kind = type(leaf).__name__
        if isinstance(leaf, torch.Tensor):
            shape = list(leaf.shape) if sizes else f" of {leaf.dim()} dimensions"
            kind = f"{str(leaf.dtype).removeprefix('torch.')}{shape} on {leaf.device.type}"
        return f"{name}: {kind}" if name else kind

    return f"{operation}({', '.join(describe(name, leaf) for name, leaf in named_leaves(data))})"


def verify_operation(function: F) -> F:
    """Compare the first argument across ranks before the operation runs, in debug mode only."""

    @functools.wraps(function)
    def checked(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        runtime = Runtime.current()
        if runtime.debug and runtime.num_processes > 1:
            _require_agreement(_describe(function.__name__, tensor), runtime)
        return function(tensor, *args, **kwargs)

    return cast(F, checked)


def collective(function: F) -> F:
    """Count the calls of a function as waiting. Where members come and go, a call survives the loss of one."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        runtime = Runtime.current()
        if runtime.recovery is None:
            return function(*args, **kwargs)
        return runtime.run_collective(functools.partial(function, *args, **kwargs))

    return waits_for_others(cast(F, wrapper))


def _collective_from_one(function: F) -> F:
    """Do the same for a function that gives every rank the data of `from_process`."""

    @functools.wraps(function)
    def wrapper(data: Any, from_process: int = 0) -> Any:
        call = functools.partial(function, data, from_process)
        return Runtime.current().run_collective(call, source=from_process)

    return waits_for_others(cast(F, wrapper))


def _require_agreement(mine: str, runtime: Runtime) -> None:
    per_rank: list[Any] = [None] * runtime.num_processes
    dist.all_gather_object(per_rank, mine)
    if all(theirs == per_rank[0] for theirs in per_rank):
        return
    table = "\n".join(f"  rank {rank}: {theirs}" for rank, theirs in enumerate(per_rank))
    raise DistributedOperationException(
        f"Rank {runtime.process_index}: every rank must make the same call with the same names, shapes and types, but "
        f"they made these:\n{table}\n"
        "Make shapes equal with accelerator.pad_across_processes(), or use gather_object() for ragged data.",
        per_rank,
    )


def mesh_of(tensor: torch.Tensor) -> Any:
    """Return the mesh that a tensor is distributed over, or None for a plain tensor."""
    return getattr(tensor, "device_mesh", None)  # torch.distributed.tensor takes long to import


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor on every process. All ranks of its mesh must call it."""
    return tensor if mesh_of(tensor) is None else tensor.full_tensor()  # type: ignore[attr-defined]


def _gather_tensor(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    tensor = whole(tensor)  # a loss over a sharded vocabulary is a DTensor
    tensor = tensor.reshape(1) if tensor.dim() == 0 else tensor.contiguous()
    world_size = Runtime.current().num_processes
    ranks = world_size if group is None else group.size()
    if ranks == world_size:
        record_call("gather", tensor)
    gathered = tensor.new_empty((ranks * tensor.shape[0], *tensor.shape[1:]))
    all_gather_single(sendable(gathered), sendable(tensor.detach() if tensor.requires_grad else tensor), group=group)
    return gathered


def sendable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor, or its bytes where the backends do not know its number format."""
    return tensor.view(-1).view(torch.uint8) if tensor.dtype in _SENT_AS_BYTES else tensor


_gather_tensor.__name__ = "gather"


@collective
@verify_operation
def gather(tensor: Any, group: Any = None) -> Any:
    """Concatenate the tensors of all ranks, or of a group, in rank order, along the first dimension.

    0-dimensional tensors become one-dimensional. Shapes must agree: see `pad_across_processes`.
    """
    if Runtime.current().num_processes == 1:
        return tensor
    if isinstance(tensor, torch.Tensor):
        return _gather_tensor(tensor, group)
    return recursively_apply(_gather_tensor, tensor, group, error_on_other_type=True)


@collective
def gather_object(object: Any, group: Any = None) -> Any:
    """Gather picklable objects: a list from each rank, or each of a group, becomes one list, in rank order."""
    runtime = Runtime.current()
    if runtime.num_processes == 1:
        return object
    gathered: list[Any] = [None] * (runtime.num_processes if group is None else group.size())
    dist.all_gather_object(gathered, object, group=group)
    return [item for items in gathered for item in items]


@collective
@verify_operation
def reduce(tensor: Any, reduction: Reduction = "mean", scale: float = 1.0) -> Any:
    """Sum, average, or take the largest or smallest of all ranks' tensors; every rank receives it, times `scale`."""
    if reduction not in get_args(Reduction):
        choices = ", ".join(get_args(Reduction))
        raise ValueError(f"reduce() was given reduction={reduction!r}: use one of {choices}.")
    operation = _OPERATIONS.get(reduction, dist.ReduceOp.SUM)
    world_size = Runtime.current().num_processes

    def reduce_tensor(leaf: torch.Tensor) -> torch.Tensor:
        # Contiguous, because the backend adds raw memory, whatever the strides.
        reduced = whole(leaf.detach()).clone(memory_format=torch.contiguous_format) if world_size > 1 else leaf
        if world_size > 1 and reduction != "none":
            record_call("reduce", reduced)
            reduced = reduced.to(_ADDED_AS.get(leaf.dtype, leaf.dtype))
            dist.all_reduce(reduced, op=operation)
        reduced = reduced / world_size if reduction == "mean" and world_size > 1 else reduced.to(leaf.dtype)
        return reduced if scale == 1.0 else reduced * scale

    reduce_tensor.__name__ = "reduce"
    return recursively_apply(reduce_tensor, tensor, error_on_other_type=True)


@_collective_from_one
@verify_operation
def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Give every rank the tensors of one rank. The tensors are overwritten in place and returned."""
    if Runtime.current().num_processes == 1:
        return tensor

    def broadcast_tensor(leaf: torch.Tensor) -> torch.Tensor:
        buffer = leaf.contiguous()
        record_call("broadcast", buffer)
        dist.broadcast(sendable(buffer), src=from_process)
        return leaf if buffer is leaf else leaf.copy_(buffer)

    broadcast_tensor.__name__ = "broadcast"
    return recursively_apply(broadcast_tensor, tensor, error_on_other_type=True)


@_collective_from_one
def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Overwrite a list of picklable objects with that of one rank, on every rank."""
    if Runtime.current().num_processes > 1:
        dist.broadcast_object_list(object_list, src=from_process)
    return object_list


@collective
def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Pad the tensors of all ranks along one dimension to the longest, so that they can be gathered."""
    runtime = Runtime.current()
    world_size = runtime.num_processes
    if runtime.debug and world_size > 1:
        _require_agreement(_describe("pad_across_processes", tensor, sizes=False), runtime)

    def pad(leaf: torch.Tensor) -> torch.Tensor:
        if getattr(leaf, "is_nested", False):
            warn(
                "Cannot pad nested tensors without more information: it was left as it is. Pad it with "
                "torch.nested.to_padded_tensor() first.",
                CannotPadNestedTensorWarning,
            )
            return leaf
        if world_size == 1 or not -leaf.dim() <= dim < leaf.dim():
            return leaf
        axis = dim % leaf.dim()
        length = torch.tensor([leaf.shape[axis]], device=leaf.device)
        longest = int(_gather_tensor(length).max())
        if longest == leaf.shape[axis]:
            return leaf
        padded = leaf.new_full((*leaf.shape[:axis], longest, *leaf.shape[axis + 1 :]), pad_index)
        start = longest - leaf.shape[axis] if pad_first else 0
        padded.narrow(axis, start, leaf.shape[axis]).copy_(leaf)
        return padded

    pad.__name__ = "pad_across_processes"
    padded = recursively_apply(pad, tensor, error_on_other_type=world_size > 1)
    return tensor if world_size == 1 else padded


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Repeat the last row of every tensor until the batch divides by the number of processes."""
    missing = -batch_size % num_processes

    def pad(leaf: torch.Tensor) -> torch.Tensor:
        if missing == 0 or leaf.shape[dim] != batch_size:
            return leaf
        last = leaf.narrow(dim, batch_size - 1, 1)
        return torch.cat([leaf, *([last] * missing)], dim=dim)

    return recursively_apply(pad, tensor, error_on_other_type=True)


def gather_tensor_shape(tensor: torch.Tensor) -> list[list[int]]:
    """Return the shape of the tensor on every rank."""
    shapes: list[Any] = [list(tensor.shape)]
    return cast("list[list[int]]", gather_object(shapes))
