"""Put full tensors together from their parts, one after the other, in bounded memory.

[Note: buckets] Small tensors are packed: their parts are sent in one collective per bucket. A large one is gathered
alone, straight into its place where its parts follow one another there and a quarter of a bucket holds it, because some
backends copy what they gather; else in pieces. So beside the model a process holds a quarter of a bucket of packed
tensors, the tensor that was yielded last, the one that is being put together, and one piece. Every process makes the
same collectives in the same order: they follow from the forms, which are the same everywhere.

[Note: stages] A stage of a pipeline holds tensors that others lack. Its processes first send their parts along the `pp`
axis, and then every stage gathers them among its own processes: less is sent than if full tensors were.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..runtime.collectives.operations import all_gather_single
from .forms import Form, Held

_SMALL = 1 << 20
_ALIGNMENT = 16


@dataclass(frozen=True)
class Wanted:
    """A tensor to put together."""

    form: Form
    held: Held | None
    """What this process has of it; None if another stage has it."""
    owner: int | None = None
    """The stage that has it, where not every process has a part; by the place along the `pp` axis."""
    dtype: torch.dtype | None = None
    """Convert it to this dtype before it is sent."""

    @property
    def sent_as(self) -> Form:
        """The form with the dtype in which it is sent."""
        return self.form if self.dtype is None else Form(self.form.shape, self.dtype, self.form.cuts, self.form.is_flat)

    @property
    def is_here(self) -> bool:
        """Whether every process has it whole."""
        return self.owner is None and not self.form.cuts


@dataclass(frozen=True)
class Stages:
    """The processes of a pipeline."""

    rows: tuple[tuple[int, ...], ...]
    """For each stage its ranks; ranks in the same place send to each other."""
    group: Any
    """The ranks in the same place as this one."""

    @property
    def own(self) -> int:
        """The stage of this process."""
        return next(index for index, row in enumerate(self.rows) if dist.get_rank() in row)

    def counterparts(self, ranks: Sequence[int], owner: int) -> tuple[int, ...]:
        """Return the ranks of this stage in the places of those of the owner's stage."""
        theirs, here = self.rows[owner], self.rows[self.own]
        return tuple(here[theirs.index(rank)] for rank in ranks)

    def source(self, owner: int) -> int:
        """Return the rank of another stage in the place of this one."""
        return self.rows[owner][self.rows[self.own].index(dist.get_rank())]


class Gatherer:
    """Puts tensors together. Collective: every process wants the same tensors in the same order."""

    def __init__(self, device: torch.device, bucket_size: int, stages: Stages | None = None) -> None:
        self.device = device
        self.bucket_size = bucket_size
        self.stages = stages
        self._groups: dict[tuple[int, ...], Any] = {}

    def tensors(self, wanted: Sequence[Wanted], ranks: Sequence[tuple[int, ...]]) -> Iterator[Tensor]:
        """Yield full tensors in the given order; `ranks` are those with the parts of each, on its owner's stage."""
        packed: dict[int, Packed] = {}
        for index, (one, members) in enumerate(zip(wanted, ranks, strict=True)):
            if one.is_here:
                assert one.held is not None
                yield one.held.part.to(self.device, one.dtype).view(one.form.shape)
            elif one.sent_as.nbytes >= _SMALL:
                yield self._alone(one, members)
            else:
                if index not in packed:
                    packed = self._pack(wanted, ranks, index)
                yield packed.pop(index).unpack()

    # --- large tensors ----------------------------------------------------------------------------------------------

    def _alone(self, one: Wanted, members: tuple[int, ...]) -> Tensor:
        """Gather one tensor."""
        form = one.sent_as
        full = torch.empty(form.shape, dtype=form.dtype, device=self.device)
        fits = form.num_parts == 1 or form.nbytes <= self.bucket_size // 4
        if fits and form.is_consecutive:
            gathered = full.view(-1)
            self._gather(gathered, self._part(one, gathered), one, members)
            return full
        rows = form.rows_of_parts
        step = max(1, rows * self.bucket_size // (8 * max(form.nbytes, 1)))
        for start in range(0, rows, step):
            self._gather_rows(full, one, members, (start, min(step, rows - start)))
        return full

    def _gather_rows(self, full: Tensor, one: Wanted, members: tuple[int, ...], rows: tuple[int, int]) -> None:
        """Gather some rows of the parts of a tensor, and write them where they belong."""
        form = one.sent_as
        shapes = [form.part_shape(part) for part in range(form.num_parts)]
        counts = [max(0, min(rows[1], shape[0] - rows[0])) for shape in shapes]
        width = max(math.prod(shape[1:]) for shape in shapes)
        size = rows[1] * width
        own = full.new_empty(size)
        if one.held is not None:
            part = one.held.part[rows[0] : rows[0] + rows[1]]
            own[: part.numel()].view(part.shape).copy_(part)
        gathered = full.new_empty(form.num_parts * size)
        self._gather(gathered, own, one, members)
        for part_index, (shape, count) in enumerate(zip(shapes, counts, strict=True)):
            if count:
                begin = part_index * size
                values = gathered[begin : begin + count * math.prod(shape[1:])]
                form.write(full, part_index, (rows[0], count), values)

    def _part(self, one: Wanted, gathered: Tensor) -> Tensor:
        """Return this process's part as it is sent, or the place for one that another stage sends."""
        parts = one.form.num_parts
        if one.held is None:
            return gathered if parts == 1 else gathered.new_empty(gathered.numel() // parts)
        own = one.held.part.to(self.device, one.dtype).contiguous().view(-1)
        return gathered.copy_(own) if parts == 1 else own

    # --- small tensors ----------------------------------------------------------------------------------------------

    def _pack(self, wanted: Sequence[Wanted], ranks: Sequence[tuple[int, ...]], first: int) -> dict[int, Packed]:
        """Gather the next small tensors: one collective for those that the same processes hold."""
        chosen: dict[tuple[int | None, tuple[int, ...]], list[int]] = {}
        total = 0
        for index in range(first, len(wanted)):
            one = wanted[index]
            if one.is_here or one.sent_as.nbytes >= _SMALL:
                continue
            if total and total + one.sent_as.nbytes > self.bucket_size // 4:
                break
            total += one.sent_as.nbytes
            chosen.setdefault((one.owner, ranks[index]), []).append(index)
        packed: dict[int, Packed] = {}
        for (_, members), indices in chosen.items():
            packed |= self._pack_together([(index, wanted[index]) for index in indices], members)
        return packed

    def _pack_together(self, together: list[tuple[int, Wanted]], members: tuple[int, ...]) -> dict[int, Packed]:
        starts, size = [], 0
        for _, one in together:
            form = one.sent_as
            starts.append(size)
            size += -(-form.largest_part * form.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        own = torch.empty(size, dtype=torch.uint8, device=self.device)
        for (_, one), start in zip(together, starts, strict=True):
            if one.held is not None:
                part = one.held.part
                end = start + part.numel() * one.sent_as.dtype.itemsize
                own[start:end].view(one.sent_as.dtype).view(part.shape).copy_(part)
        parts = max(1, len(members))
        if parts == 1:
            gathered = own
            self._gather(own, own, together[0][1], members)
        else:
            gathered = own.new_empty(parts * size)
            self._gather(gathered, own, together[0][1], members)
        return {
            index: Packed(one.sent_as, gathered.view(parts, size), start)
            for (index, one), start in zip(together, starts, strict=True)
        }

    # --- collectives ------------------------------------------------------------------------------------------------

    def _gather(self, gathered: Tensor, own: Tensor, one: Wanted, members: tuple[int, ...]) -> None:
        """Let every process have the parts of all `members`, or of their counterparts in its stage."""
        if one.owner is not None:
            assert self.stages is not None
            dist.broadcast(_as_bytes(own), src=self.stages.source(one.owner), group=self.stages.group)
        if len(members) < 2:
            return
        group = None if one.held is None else one.held.group
        if group is None:
            group = self._group_of(members if one.owner is None else self._counterparts(members, one.owner))
        all_gather_single(_as_bytes(gathered), _as_bytes(own), group=group)

    def _counterparts(self, members: tuple[int, ...], owner: int) -> tuple[int, ...]:
        assert self.stages is not None
        return self.stages.counterparts(members, owner)

    def _group_of(self, members: tuple[int, ...]) -> Any:
        """Return the group of these ranks, which all of them ask for."""
        if members == tuple(range(dist.get_world_size())):
            return dist.group.WORLD
        if members not in self._groups:
            self._groups[members] = dist.new_group(list(members), use_local_synchronization=True)
        return self._groups[members]


@dataclass(frozen=True)
class Packed:
    """A tensor in a buffer of gathered parts."""

    form: Form
    buffer: Tensor
    """One row of bytes of each process."""
    start: int

    def unpack(self) -> Tensor:
        """Return the tensor, in memory of its own."""
        form = self.form
        full = torch.empty(form.shape, dtype=form.dtype, device=self.buffer.device)
        for part, row in enumerate(self.buffer):
            shape = form.part_shape(part)
            numel = math.prod(shape)
            if numel:
                values = row[self.start : self.start + numel * form.dtype.itemsize].view(form.dtype)
                form.write(full, part, (0, shape[0] if shape else 1), values)
        return full


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as bytes, which every backend sends."""
    return tensor.view(-1).view(torch.uint8)
