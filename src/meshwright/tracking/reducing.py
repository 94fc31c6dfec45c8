"""Reduce logged numbers over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import DistributedOperationException
from ..runtime.collectives.operations import collective
from ..runtime.devices.device import finest_reduced_float
from ..runtime.group.runtime import Runtime
from .values import is_number

_OPERATIONS = {"mean": "SUM", "sum": "SUM", "max": "MAX", "min": "MIN"}


@collective
def reduced(values: Mapping[str, Any], operation: str) -> dict[str, Any]:
    """Return the values with every number replaced by the mean, sum, max or min over all ranks; all ranks call it.

    It needs two small collectives for any number of values. Text and other values stay those of this rank.
    """
    if operation not in _OPERATIONS:
        raise ValueError(f"reduce={operation!r} is unknown: choose one of {', '.join(_OPERATIONS)}.")
    runtime = Runtime.current()
    if runtime.num_processes == 1:
        return dict(values)
    names = sorted(name for name, value in values.items() if _is_one_number(value))
    _require_same_names(names, runtime)
    if not names:
        return dict(values)
    numbers = [torch.as_tensor(values[name]).detach().reshape(()) for name in names]
    stacked = torch.stack([number.to(runtime.device, finest_reduced_float(runtime.device)) for number in numbers])
    dist.all_reduce(stacked, op=getattr(dist.ReduceOp, _OPERATIONS[operation]))
    if operation == "mean":
        stacked /= runtime.num_processes
    return {**values, **dict(zip(names, stacked.unbind(), strict=True))}


def _is_one_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else is_number(value)


def _require_same_names(names: list[str], runtime: Runtime) -> None:
    """Raise if the ranks have different names, compared by a checksum, so that no loss is added to an accuracy."""
    checksum = float(crc32("\n".join(names).encode()) >> 8)  # 24 bits, which float32 holds exactly
    checksums = torch.tensor([checksum, -checksum], device=runtime.device_of_numbers)
    dist.all_reduce(checksums, op=dist.ReduceOp.MAX)
    highest, lowest = checksums[0].item(), -checksums[1].item()
    if highest == lowest:
        return
    per_rank: list[Any] = [None] * runtime.num_processes
    dist.all_gather_object(per_rank, names)
    listing = "\n".join(
        f"  rank {rank}: {', '.join(names_of_rank) or 'none'}" for rank, names_of_rank in enumerate(per_rank)
    )
    raise DistributedOperationException(
        f"accelerator.log(..., reduce=...) needs the same numbers on every rank, and on rank {runtime.process_index} "
        f"saw different names:\n{listing}\nLog the same names everywhere, or log without reduce.",
        per_rank,
    )
