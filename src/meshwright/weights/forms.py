"""How a tensor is divided over processes: which rows and columns each of them holds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedSettingError
from ..parallel.modules.dtensors import local, mesh_of
from ..precision.quantized import is_composed

Run = tuple[int, int]
"""Consecutive rows or columns: the first one, and how many."""


@dataclass(frozen=True)
class Cut:
    """One mesh axis along which a dimension is divided."""

    dim: int
    num_parts: int
    stride: int = 1
    """In how many pieces the dimension is divided before; a part is made of one part of each."""


@dataclass(frozen=True)
class Form:
    """A full tensor, and how it is divided. It is the same on every process."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    cuts: tuple[Cut, ...] = ()
    is_flat: bool = False
    """The elements are divided as one row of numbers (ZeRO-3), in the one part of each cut."""

    @property
    def numel(self) -> int:
        """The number of elements of the full tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the full tensor in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def num_parts(self) -> int:
        """The number of parts that make the full tensor."""
        return math.prod(cut.num_parts for cut in self.cuts)

    @property
    def _grid(self) -> tuple[int, ...]:
        """The shape of what is divided."""
        return (self.numel,) if self.is_flat else self.shape

    def part_shape(self, part: int) -> tuple[int, ...]:
        """Return the shape of one part."""
        return tuple(sum(length for _, length in runs) for runs in self._runs(part))

    @property
    def largest_part(self) -> int:
        """The number of elements of the largest part."""
        return max(math.prod(self.part_shape(part)) for part in range(self.num_parts))

    @property
    def rows_of_parts(self) -> int:
        """The number of rows of the largest part."""
        return max((self.part_shape(part) or (1,))[0] for part in range(self.num_parts))

    def _runs(self, part: int) -> tuple[tuple[Run, ...], ...]:
        return _runs_of(self._grid, self.cuts, part)

    @property
    def is_consecutive(self) -> bool:
        """Whether the full tensor is its parts, one after the other, all of the same size."""
        first = self.part_shape(0)
        if not first or self.numel == 0:
            return self.num_parts == 1
        start = 0
        for part in range(self.num_parts):
            rows, *others = self._runs(part)
            whole = all(runs == ((0, size),) for runs, size in zip(others, self._grid[1:], strict=True))
            if not whole or rows != ((start, first[0]),):
                return False
            start += first[0]
        return start == self._grid[0]

    def write(self, full: Tensor, part: int, rows: Run, values: Tensor) -> None:
        """Write rows of a part, which are given in its own numbers, into the full tensor."""
        target = full.view(self._grid) if self.is_flat else full
        if not self._grid:
            target.copy_(values.reshape(()))
            return
        first, *others = self._runs(part)
        values = values.view(rows[1], *self.part_shape(part)[1:])
        for region in product(_numbered(_within(first, rows)), *map(_numbered, others)):
            theirs, own = target, values
            for dim, (start, length, offset) in enumerate(region):
                theirs, own = theirs.narrow(dim, start, length), own.narrow(dim, offset, length)
            theirs.copy_(own)


def _numbered(runs: tuple[Run, ...]) -> list[tuple[int, int, int]]:
    """Return runs with the place of each in a part, which holds one after the other."""
    found, offset = [], 0
    for start, length in runs:
        found.append((start, length, offset))
        offset += length
    return found


def _within(runs: tuple[Run, ...], rows: Run) -> tuple[Run, ...]:
    """Return what some rows of a part are in the full tensor."""
    first, end = rows[0], rows[0] + rows[1]
    found = []
    for start, length, offset in _numbered(runs):
        begin, stop = max(first, offset), min(end, offset + length)
        if begin < stop:
            found.append((start + begin - offset, stop - begin))
    return tuple(found)


@cache
def _runs_of(grid: tuple[int, ...], cuts: tuple[Cut, ...], part: int) -> tuple[tuple[Run, ...], ...]:
    """Return the rows, columns and so on that one part holds."""
    coordinates = []
    for cut in reversed(cuts):
        part, own = divmod(part, cut.num_parts)
        coordinates.append(own)
    runs: list[list[Run]] = [[(0, size)] for size in grid]
    for cut, own in zip(cuts, reversed(coordinates), strict=True):
        pieces = _chunks(runs[cut.dim], cut.stride)
        runs[cut.dim] = [run for piece in pieces for run in _chunks(piece, cut.num_parts)[own]]
    return tuple(tuple(each) for each in runs)


def _chunks(runs: list[Run], count: int) -> list[list[Run]]:
    """Divide runs as `torch.chunk` divides a dimension, with empty chunks at the end."""
    total = sum(length for _, length in runs)
    size = -(-total // count)
    bounds = [(min(size * index, total), min(size * (index + 1), total)) for index in range(count)]
    return [list(_within(tuple(runs), (begin, end - begin))) for begin, end in bounds]


@dataclass(frozen=True)
class Held:
    """A tensor as this process holds it: its part, and who holds the others."""

    form: Form
    part: Tensor
    ranks: tuple[int, ...] = ()
    """The processes with the parts, in the order of the parts; empty for a whole tensor."""
    group: Any = field(default=None, compare=False, repr=False)
    """The process group of these ranks, if there is one already."""


Rows = dict[Any, tuple[tuple[int, ...], Any]]
"""The ranks along axes of a mesh, and their group: known from tensors before, because a mesh takes long to tell."""


def held(name: str, tensor: Tensor, rows: Rows) -> Held:
    """Return how a tensor is held; refuse a kind that cannot be put together."""
    if hasattr(tensor, "ds_id"):
        return _partitioned(name, tensor)
    mesh = mesh_of(tensor)
    own = local(tensor).detach()
    if is_composed(own) or own.layout != torch.strided:
        raise UnsupportedSettingError(
            f"accelerator.weights() with {name}, a {type(own).__name__}",
            "only tensors of plain numbers are sent, and this one is composed of several.",
            "Dequantise the model, or serve an adapter of it: accelerator.weights(model, adapter='only').",
        )
    if mesh is None:
        return Held(Form(tuple(own.shape), own.dtype), own)
    spread: Any = tensor
    cuts, axes = [], []
    for axis, (placement, size) in enumerate(zip(spread.placements, mesh.shape, strict=True)):
        dim = getattr(placement, "dim", None)
        if placement.is_partial():
            raise UnsupportedSettingError(
                f"accelerator.weights() with {name}, which is {placement}",
                "its values are sums that were not made yet.",
                "Redistribute it to Replicate() or Shard() before.",
            )
        if dim is not None and size > 1:
            cuts.append(Cut(dim % tensor.dim(), size, getattr(placement, "split_factor", 1)))
            axes.append(axis)
    form = Form(tuple(tensor.shape), own.dtype, tuple(cuts))
    if not cuts:
        return Held(form, own)
    key = mesh, tuple(axes)
    if key not in rows:
        rows[key] = _ranks_along(name, mesh, axes), mesh.get_group(axes[0]) if len(axes) == 1 else None
    ranks, group = rows[key]
    _check(name, form, own, ranks)
    return Held(form, own, ranks, group)


def _ranks_along(name: str, mesh: Any, axes: list[int]) -> tuple[int, ...]:
    own = mesh.get_coordinate()
    index = tuple(slice(None) if axis in axes else place for axis, place in enumerate(own))
    ranks = tuple(mesh.mesh[index].flatten().tolist())
    if list(ranks) != sorted(ranks):
        raise UnsupportedSettingError(
            f"accelerator.weights() with {name} on a mesh whose ranks are {ranks}",
            "groups of processes have their ranks in ascending order, and the parts would be mixed up.",
            "Make the mesh with its ranks in order.",
        )
    return ranks


def _check(name: str, form: Form, own: Tensor, ranks: tuple[int, ...]) -> None:
    rank = torch.distributed.get_rank()
    expected = form.part_shape(ranks.index(rank))
    if tuple(own.shape) != expected:
        raise ValueError(
            f"Rank {rank}: {name} has the shape {form.shape}, and its part here has {tuple(own.shape)} instead of "
            f"{expected}. It was divided in another way than its placements say."
        )


def _partitioned(name: str, tensor: Any) -> Held:
    """Return how a parameter of ZeRO-3 is held: as one row of numbers, in parts of the same size."""
    import torch.distributed as dist

    own = tensor.ds_tensor
    if own.device.type == "meta" or not own.numel() or own.dtype != tensor.dtype:
        raise UnsupportedSettingError(
            f"accelerator.weights() with {name}",
            "its part of ZeRO-3 is not in memory as plain numbers (on NVMe, or quantised).",
            "Offload parameters to the CPU: offload_param_device='cpu'.",
        )
    ranks = tuple(dist.get_process_group_ranks(tensor.ds_process_group))
    shape = tuple(tensor.ds_shape)
    form = Form(shape, own.dtype, (Cut(0, len(ranks)),) if len(ranks) > 1 else (), is_flat=True)
    size = form.part_shape(ranks.index(dist.get_rank()))[0]  # the last part is padded
    return Held(form, own.detach().view(-1)[:size], ranks if len(ranks) > 1 else (), tensor.ds_process_group)
