"""Which process holds which part of a parameter, and which process steps it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Box = tuple[slice, ...]
"""A part of a tensor: a range along each dimension."""


@dataclass(frozen=True)
class Division:
    """The part of a DTensor on each rank of its mesh."""

    boxes: dict[int, Box]
    coordinates: dict[int, tuple[int, ...]]

    @classmethod
    def of(cls, tensor: Any) -> Division:
        """Return how a DTensor is divided; computed, not communicated."""
        mesh: DeviceMesh = tensor.device_mesh
        coordinates = dict(zip(ranks_of(mesh), product(*map(range, mesh.shape)), strict=True))
        boxes = {rank: _box(tensor, mesh.shape, place) for rank, place in coordinates.items()}
        own = boxes[dist.get_rank()]
        if shape_of(own) != tuple(tensor._local_tensor.shape) or not _is_tiled(boxes.values(), tensor.shape):
            raise NotImplementedError(
                f"Rank {dist.get_rank()}: a parameter of {tuple(tensor.shape)} with the placements {tensor.placements} "
                "is not divided into blocks that are known here, so it cannot be stepped whole."
            )
        return cls(boxes, coordinates)

    def sources(self, owner: int) -> dict[int, Box]:
        """Return which ranks send which parts to an owner: for each part the holder that is nearest in the mesh."""
        place = self.coordinates[owner]

        def distance(rank: int) -> int:
            return sum(one != other for one, other in zip(self.coordinates[rank], place, strict=True))

        nearest: dict[Any, int] = {}
        for rank in sorted(self.boxes, key=distance):
            nearest.setdefault(_key(self.boxes[rank]), rank)
        return {rank: self.boxes[rank] for rank in sorted(nearest.values()) if _size(self.boxes[rank])}

    def holders(self) -> dict[int, Box]:
        """Return all ranks that hold a part."""
        return {rank: box for rank, box in self.boxes.items() if _size(box)}


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """Return the ranks of a mesh, in the order of their coordinates."""
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the shape of a part."""
    return tuple(part.stop - part.start for part in box)


def _size(box: Box) -> int:
    return math.prod(shape_of(box))


def _key(box: Box) -> tuple[tuple[int, int], ...]:
    return tuple((part.start, part.stop) for part in box)  # slices are not hashable before Python 3.12


def _box(tensor: Any, sizes: Sequence[int], place: Sequence[int]) -> Box:
    ranges = [(0, size) for size in tensor.shape]
    for axis in _order(tensor.placements):
        dim = tensor.placements[axis].dim
        start, end = ranges[dim]
        length = -(-(end - start) // sizes[axis])  # as torch.chunk
        ranges[dim] = (min(start + place[axis] * length, end), min(start + (place[axis] + 1) * length, end))
    return tuple(slice(start, end) for start, end in ranges)


def _order(placements: Sequence[Any]) -> list[int]:
    """Return the axes that divide a tensor, in the order in which they do.

    FSDP2 divides what tensor parallelism has divided, although its axis comes first; torch marks it as strided.
    """
    dividing = [axis for axis, placement in enumerate(placements) if getattr(placement, "dim", None) is not None]
    strided = [axis for axis in dividing if hasattr(placements[axis], "split_factor")]
    return [axis for axis in dividing if axis not in strided] + strided[::-1]


def _is_tiled(boxes: Iterable[Box], shape: Sequence[int]) -> bool:
    return sum(_size(box) for box in {_key(box): box for box in boxes}.values()) == math.prod(shape)


class ShardGroup:
    """Ranks that hold shards of the same parameters, and step whole ones for each other."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.ranks = sorted(ranks_of(mesh))
        self._mesh = mesh
        self._group: Any = None
        self._loads = dict.fromkeys(self.ranks, 0.0)

    @property
    def group(self) -> Any:
        """The process group; made on first use, by all members."""
        if self._group is None:
            if self._mesh.ndim == 1:
                self._group = self._mesh.get_group()
            elif len(self.ranks) == dist.get_world_size():
                self._group = dist.group.WORLD
            else:
                self._group = dist.new_group(self.ranks, use_local_synchronization=True)
        return self._group

    def assign(self, costs: Sequence[tuple[float, Tensor]]) -> list[tuple[Tensor, int]]:
        """Give every parameter to the rank with the least work so far, the most expensive ones first."""
        owners = []
        for cost, param in sorted(costs, key=lambda each: -each[0]):
            owner = min(self.ranks, key=lambda rank: (self._loads[rank], rank))
            self._loads[owner] += cost
            owners.append((param, owner))
        return owners


def cost_of(param: Tensor) -> float:
    """Return the work of a step: the products of an iteration of Newton and Schulz, or one visit of every element."""
    return float(param.numel() * (min(param.shape[-2:]) if param.ndim > 1 else 1))
