"""Which positions of a sequence each process gets: whole pieces, or pieces that balance the work of attention.

[Note: balance] A query attends to the keys before it in its document, so its work is its position there. One document
is divided as torch does it: every process gets one chunk from the front and one from the back. Several documents are
divided into `_BLOCKS` blocks per process; beginning with the block of most work, each goes to the process with the
least work so far. Every process gets the same number of positions, up to one. The choice affects speed only: attention
restores the order of the keys, and takes documents from the model's own call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Literal

import torch
from torch import Tensor

_BLOCKS = 16


class Sharding:
    """The positions of every process, in increasing order, for all sequences of a batch or for each of them."""

    def __init__(self, order: Tensor, sizes: Sequence[int], rank: int, *, head_tail: bool = False) -> None:
        """Take the positions as [sequences or 1, length], those of the first process first."""
        self.order = order
        self.sizes = tuple(sizes)
        self.rank = rank
        self.is_head_tail = head_tail
        """Whether this is the division that torch's ring attention expects."""
        start = sum(self.sizes[:rank])
        self.own = order[:, start : start + self.sizes[rank]]
        self._placed: dict[tuple[str, torch.device], Tensor] = {}

    @property
    def length(self) -> int:
        """The length of the whole sequences."""
        return self.order.shape[1]

    @property
    def own_length(self) -> int:
        """The number of positions that this process has."""
        return self.sizes[self.rank]

    @cached_property
    def inverse(self) -> Tensor:
        """Where each position stands when the parts of all processes are concatenated."""
        return self.order.argsort(dim=1)

    @cached_property
    def is_in_order(self) -> bool:
        """Whether the concatenated parts are the sequence already."""
        return bool((self.order == torch.arange(self.length)).all())

    def on(self, device: torch.device, name: Literal["own", "order", "inverse"]) -> Tensor:
        """Return positions on a device, where they stay: a copy from the host waits for it."""
        if (name, device) not in self._placed:
            self._placed[name, device] = getattr(self, name).to(device)
        return self._placed[name, device]

    def part_of(self, whole: Tensor, dim: int) -> Tensor:
        """Return this process's positions of a tensor."""
        return select(whole, dim, self.on(whole.device, "own"))


def select(tensor: Tensor, dim: int, positions: Tensor) -> Tensor:
    """Select positions [sequences or 1, count], on the device of a tensor whose first dimension is the batch."""
    if len(positions) == 1:
        return tensor.index_select(dim, positions[0])
    shape = [1] * tensor.dim()
    shape[0], shape[dim] = positions.shape
    return torch.take_along_dim(tensor, positions.view(shape), dim)


@lru_cache(maxsize=16)
def contiguous(length: int, size: int, rank: int) -> Sharding:
    """Give every process one piece, in order."""
    return Sharding(torch.arange(length)[None], _even(length, size), rank)


@lru_cache(maxsize=16)
def head_tail(length: int, size: int, rank: int) -> Sharding:
    """Give every process one chunk from the front and one from the back."""
    chunks = torch.arange(length).chunk(2 * size)
    order = torch.cat([torch.cat([chunks[r], chunks[2 * size - 1 - r]]) for r in range(size)])
    return Sharding(order[None], _even(length, size), rank, head_tail=True)


def balanced(positions: Tensor, size: int, rank: int) -> Sharding:
    """Divide sequences by the work of each position, which is its place in its document. See [Note: balance]."""
    length = positions.shape[1]
    load = [0] * size
    rows = [_balanced_row(row.cumsum(0).tolist(), size, load) for row in positions + 1]
    return Sharding(torch.tensor(rows), _even(length, size), rank)


def _balanced_row(work_until: list[int], size: int, load: list[int]) -> list[int]:
    """Return the positions of one sequence, process after process; add their work to `load`."""
    length = len(work_until)
    blocks = min(_BLOCKS, length // size)
    width = length // (blocks * size)

    def work(start: int, stop: int) -> int:
        return work_until[stop - 1] - (work_until[start - 1] if start else 0) if stop > start else 0

    parts: list[list[range]] = []
    end = blocks * size * width
    for rank, count in enumerate(_even(length, size)):  # the rest of the division: one short piece each
        start, end = end, end + count - blocks * width
        parts.append([range(start, end)])
        load[rank] += work(start, end)
    starts = range(0, blocks * size * width, width)
    for start in sorted(starts, key=lambda start: -work(start, start + width)):
        rank = min((r for r in range(size) if len(parts[r]) <= blocks), key=lambda r: load[r])
        parts[rank].append(range(start, start + width))
        load[rank] += work(start, start + width)
    return [position for part in parts for piece in sorted(part, key=lambda r: r.start) for position in piece]


def _even(length: int, size: int) -> list[int]:
    return [length // size + (rank < length % size) for rank in range(size)]


def positions_among(buffers: Sequence[Tensor], dims: Sequence[int]) -> Tensor | None:
    """Return the places in documents, [batch, length] on the CPU, if one of the buffers has some that start again.

    Such a buffer holds integers that are each 0 or one more than the last. Several sequences with different documents
    must be the first dimension of all buffers, because each is then divided by itself.
    """
    length = buffers[0].shape[dims[0]]
    candidates = [
        buffer.detach().reshape(-1, length)
        for buffer, dim in zip(buffers, dims, strict=True)
        if buffer.dtype in (torch.int32, torch.int64) and dim == buffer.dim() - 1 and buffer.dim() <= 2
    ]
    if not candidates:
        return None
    facts = torch.stack([_facts(found).to(candidates[0].device) for found in candidates])
    for found, (are_places, are_equal) in zip(candidates, facts.tolist(), strict=True):  # one wait for the device
        if not are_places:
            continue
        if are_equal:
            return found[:1].cpu()
        batched = all(d > 0 and len(b) == len(found) for b, d in zip(buffers, dims, strict=True))
        return found.cpu() if batched and found.shape[1] == length else None
    return None


def _facts(found: Tensor) -> Tensor:
    """Return whether these are places in documents, one of which starts again, and whether all sequences are equal."""
    follows = found[:, 1:] == found[:, :-1] + 1
    restarts = found[:, 1:] == 0
    are_places = (found[:, 0] == 0).all() & (follows | restarts).all() & restarts.any()
    return torch.stack([are_places, (found == found[:1]).all()])
