"""One number out of those of all ranks, before it is logged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import DistributedOperationException
from ..runtime.devices.device import finest_float
from ..runtime.group.runtime import Runtime
from .values import is_number

_OPERATIONS = {"mean": "SUM", "sum": "SUM", "max": "MAX", "min": "MIN"}


def reduced(values: Mapping[str, Any], how: str) -> dict[str, Any]:
    """Return the values with every number replaced by the mean, sum, max or min over all ranks; all ranks call it.

    Two small messages, however many numbers there are. Text and whatever else is no number stays this rank's.
    """
    if how not in _OPERATIONS:
        raise ValueError(f"reduce={how!r} is unknown: choose one of {', '.join(_OPERATIONS)}.")
    runtime = Runtime.current()
    if runtime.num_processes == 1:
        return dict(values)
    names = sorted(name for name, value in values.items() if _is_one_number(value))
    _require_same_names(names, runtime)
    if not names:
        return dict(values)
    numbers = [torch.as_tensor(values[name]).detach().reshape(()) for name in names]
    together = torch.stack([number.to(runtime.device, finest_float(runtime.device)) for number in numbers])
    dist.all_reduce(together, op=getattr(dist.ReduceOp, _OPERATIONS[how]))
    if how == "mean":
        together /= runtime.num_processes
    return {**values, **dict(zip(names, together.unbind(), strict=True))}


def _is_one_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else is_number(value)


def _require_same_names(names: list[str], runtime: Runtime) -> None:
    """Refuse to add a loss to an accuracy: one number says whether all ranks bring the same names."""
    mark = float(crc32("\n".join(names).encode()) >> 8)  # 24 bits, which float32 holds exactly
    marks = torch.tensor([mark, -mark], device=runtime.device)
    dist.all_reduce(marks, op=dist.ReduceOp.MAX)
    highest, lowest = marks[0].item(), -marks[1].item()
    if highest == lowest:
        return
    per_rank: list[Any] = [None] * runtime.num_processes
    dist.all_gather_object(per_rank, names)
    listing = "\n".join(f"  rank {rank}: {', '.join(theirs) or 'none'}" for rank, theirs in enumerate(per_rank))
    raise DistributedOperationException(
        f"accelerator.log(..., reduce=...) needs the same numbers on every rank, and on rank {runtime.process_index} "
        f"saw different names:\n{listing}\nLog the same names everywhere, or log without reduce.",
        per_rank,
    )
