"""Bring the parts of parameters and gradients to the processes that step them, and the results back.

[Note: rounds] The matrices of a step are exchanged in rounds of bounded size: one all-to-all brings everything of a
round to its owners, and one brings the results back, whatever the number of matrices and their dtypes. While a round is
stepped, the next one arrives and the last one leaves. A step therefore needs the memory of a few rounds besides the
shards, and its communication overlaps with its computation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...modules.dtensors import local
from .division import Box, Division, ShardGroup, shape_of

ROUND_BYTES = 2**28
"""The parameters that a process steps in one round."""
_ALIGNMENT = 16


@dataclass(frozen=True)
class MatrixTask:
    """A parameter, how it is divided, and the rank that steps it."""

    param: Tensor
    division: Division
    owner: int

    @property
    def gradient(self) -> Tensor:
        """The part of the gradient here."""
        gradient: Any = self.param.grad
        placements = getattr(self.param, "placements", None)
        if getattr(gradient, "placements", None) != placements:
            gradient = gradient.redistribute(placements=placements)
        return local(gradient)

    @property
    def own(self) -> Tensor:
        """The part of the parameter here."""
        return local(self.param.detach())


@dataclass(frozen=True)
class Full:
    """A parameter that is stepped here: the DTensor, and the full tensor with its gradient."""

    param: Tensor
    whole: Tensor


class Round:
    """What is exchanged at once; see [Note: rounds]."""

    def __init__(self, shard_group: ShardGroup, tasks: Sequence[MatrixTask]) -> None:
        self.shard_group = shard_group
        self.rank = dist.get_rank()
        self.tasks = tasks
        self.owned = [index for index, task in enumerate(tasks) if task.owner == self.rank]
        to_owner: _Routes = {rank: [] for rank in shard_group.ranks}
        from_sources: _Routes = {rank: [] for rank in shard_group.ranks}
        from_owner: _Routes = {rank: [] for rank in shard_group.ranks}
        to_holders: _Routes = {rank: [] for rank in shard_group.ranks}
        for index, task in enumerate(tasks):
            sources, holders = task.division.sources(task.owner), task.division.holders()
            if self.rank in sources:
                to_owner[task.owner].append((index, sources[self.rank]))
            if self.rank in holders:
                from_owner[task.owner].append((index, holders[self.rank]))
            if task.owner == self.rank:
                for rank in shard_group.ranks:
                    from_sources[rank] += [(index, sources[rank])] if rank in sources else []
                    to_holders[rank] += [(index, holders[rank])] if rank in holders else []
        self._gathering = _Message(to_owner, tasks, copies=2), _Message(from_sources, tasks, copies=2)
        self._scattering = _Message(to_holders, tasks), _Message(from_owner, tasks)

    def gather(self) -> Callable[[], list[Full]]:
        """Send this rank's parts to the owners; return a function that waits for the parameters of this rank."""
        outgoing, incoming = self._gathering
        parts = [part for index, _ in outgoing.places for part in (self.tasks[index].gradient, self.tasks[index].own)]
        arrived = self._send(outgoing, incoming, parts)

        def finish() -> list[Full]:
            fulls: dict[int, tuple[Tensor, Tensor]] = {}
            for index in self.owned:
                param = self.tasks[index].param
                empty = torch.empty(param.shape, dtype=param.dtype, device=param.device)
                fulls[index] = empty, torch.empty_like(empty)
            _copy([full[box] for index, box in incoming.places for full in fulls[index]], arrived())
            return [Full(self.tasks[index].param, _parameter(*fulls[index])) for index in self.owned]

        return finish

    def scatter(self, fulls: Sequence[Full]) -> Callable[[], None]:
        """Send the stepped parameters to all who hold parts of them; return a function that waits for this rank's."""
        outgoing, incoming = self._scattering
        wholes = {index: full.whole.detach() for index, full in zip(self.owned, fulls, strict=True)}
        arrived = self._send(outgoing, incoming, [wholes[index][box] for index, box in outgoing.places])
        return lambda: _copy([self.tasks[index].own for index, _ in incoming.places], arrived())

    def _send(self, outgoing: _Message, incoming: _Message, parts: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        device = self.tasks[0].own.device
        sent, received = outgoing.buffer(device), incoming.buffer(device)
        _copy(outgoing.views(sent), parts)
        work: Any = dist.all_to_all_single(
            received, sent, incoming.sizes, outgoing.sizes, group=self.shard_group.group, async_op=True
        )

        def wait(kept: Tensor = sent) -> list[Tensor]:
            work.wait()
            return incoming.views(received)

        return wait


_Routes = Mapping[int, list[tuple[int, Box]]]
"""For each rank, the parameters of a round and the parts of them."""


class _Message:
    """The buffer of one side of an all-to-all: the parts for or from every rank, each aligned for its dtype."""

    def __init__(self, routes: _Routes, tasks: Sequence[MatrixTask], copies: int = 1) -> None:
        self.places = [place for rank in sorted(routes) for place in routes[rank]]
        self.sizes: list[int] = []
        self._slots: list[tuple[int, int, torch.dtype, tuple[int, ...]]] = []
        start = 0
        for rank in sorted(routes):
            before = start
            for index, box in routes[rank]:
                dtype, shape = tasks[index].param.dtype, shape_of(box)
                length = math.prod(shape) * dtype.itemsize
                for _ in range(copies):
                    self._slots.append((start, length, dtype, shape))
                    start += -(-length // _ALIGNMENT) * _ALIGNMENT
            self.sizes.append(start - before)

    def buffer(self, device: torch.device) -> Tensor:
        return torch.empty(sum(self.sizes), dtype=torch.uint8, device=device)

    def views(self, buffer: Tensor) -> list[Tensor]:
        return [buffer[start : start + length].view(dtype).view(shape) for start, length, dtype, shape in self._slots]


def rounds_of(shard_group: ShardGroup, tasks: Sequence[MatrixTask]) -> list[Round]:
    """Divide parameters into rounds."""
    sizes = dict.fromkeys(shard_group.ranks, 0)
    rounds: dict[int, list[MatrixTask]] = {}
    for task in tasks:
        rounds.setdefault(sizes[task.owner] // ROUND_BYTES, []).append(task)
        sizes[task.owner] += task.param.numel() * task.param.element_size()
    return [Round(shard_group, rounds[number]) for number in sorted(rounds)]


def _parameter(gradient: Tensor, value: Tensor) -> Tensor:
    whole = torch.nn.Parameter(value)
    whole.grad = gradient
    return whole


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))
