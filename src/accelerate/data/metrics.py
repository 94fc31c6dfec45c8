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

    def gather(self, data: Any, as_objects: bool) -> Any:
        """Gather from every rank what belongs to its real samples.

        A result may have several rows per sample (beams, say): rows are then kept in that proportion. Results that are
        not per sample, such as a mean loss, come once from every rank that has a sample.
        """
        if as_objects:
            gathered: list[Any] = [None] * len(self.counts)
            dist.all_gather_object(gathered, data)
            return [item for items, count in zip(gathered, self.counts, strict=True) for item in items[:count]]
        return recursively_apply(self._gather_tensor, data)

    def _gather_tensor(self, tensor: Tensor) -> Tensor:
        rows = tensor.shape[0] if tensor.dim() else 1
        per_sample, others = divmod(rows, self.rows)
        if others or per_sample == 0:  # not per sample
            from_every_rank: Tensor = gather(tensor)
            return from_every_rank[torch.tensor([count > 0 for count in self.counts]).repeat_interleave(rows)]
        length = self.full * per_sample
        if rows < length:
            tensor = torch.cat([tensor, tensor.new_zeros((length - rows, *tensor.shape[1:]))])
        parts = gather(tensor[:length]).split(length)
        return torch.cat([part[: count * per_sample] for part, count in zip(parts, self.counts, strict=True)])
