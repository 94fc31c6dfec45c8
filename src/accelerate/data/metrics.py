"""Gather a round's results without what only filled it up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..runtime.collectives import gather
from ..runtime.nested import recursively_apply


@dataclass(frozen=True, kw_only=True)
class PartialRound:
    """A round in which some ranks have fewer real samples than others."""

    counts: list[int]
    """Real samples of every rank."""
    full: int
    """Samples of a full batch of one rank."""
    rows: int
    """Samples in this rank's batch, repeated ones included."""
    uneven: bool = False
    """The ranks' batches hold different numbers of samples."""
    group: Any = None
    """The ranks that see different samples: None for all."""

    def gather(self, data: Any, as_objects: bool) -> Any:
        """Gather from every rank what belongs to its real samples.

        A result may have several rows per sample (beams, say): rows are then kept in that proportion. Results that are
        not per sample, such as a mean loss, come once from every rank that has a sample.
        """
        if as_objects:
            gathered: list[Any] = [None] * len(self.counts)
            dist.all_gather_object(gathered, data, group=self.group)
            return [item for items, count in zip(gathered, self.counts, strict=True) for item in items[:count]]
        return recursively_apply(self._gather_tensor, data)

    def _gather_tensor(self, tensor: Tensor) -> Tensor:
        per_sample = self._rows_per_sample(tensor)
        rows = tensor.shape[0] if tensor.dim() else 1
        if per_sample == 0:
            from_every_rank: Tensor = gather(tensor, self.group)
            return from_every_rank[torch.tensor([count > 0 for count in self.counts]).repeat_interleave(rows)]
        length = self.full * per_sample
        if rows < length:
            tensor = torch.cat([tensor, tensor.new_zeros((length - rows, *tensor.shape[1:]))])
        parts = gather(tensor[:length], self.group).split(length)
        return torch.cat([part[: count * per_sample] for part, count in zip(parts, self.counts, strict=True)])

    def _rows_per_sample(self, tensor: Tensor) -> int:
        """Return how many rows of a result belong to a sample, 0 where it is not per sample; the same on every rank."""
        if tensor.dim() == 0:
            return 0
        mine = tensor.shape[0] // self.rows if tensor.shape[0] % self.rows == 0 else 0
        if not self.uneven:
            return mine
        on_every_rank = gather(torch.tensor([mine], device=tensor.device), self.group).tolist()
        return mine if len(set(on_every_rank)) == 1 else 0
