"""Gather the results of a round without its padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..runtime.collectives.nested import leaves, recursively_apply
from ..runtime.collectives.operations import collective, gather, gather_object, whole


@dataclass(frozen=True, kw_only=True)
class PartialRound:
    """A round in which some ranks have fewer real samples than others."""

    counts: list[int]
    """Real samples of every rank."""
    full: int
    """Samples in a full batch of one rank."""
    rows: int
    """Samples in this rank's batch, padding included."""
    uneven: bool = False
    """The ranks' batches may hold different numbers of samples."""
    group: Any = None
    """The ranks that see different samples: None for all."""

    def gather(self, data: Any, as_objects: bool) -> Any:
        """Gather the results of the real samples from every rank.

        A result may have several rows per sample, such as beams; rows are kept in that proportion. Results that are not
        per sample, such as a mean loss, are gathered once from every rank that has a real sample.
        """
        if not as_objects:
            return recursively_apply(self._gather_tensor, data)
        if self.is_single_process:
            return data if isinstance(data, Mapping) or not hasattr(data, "__getitem__") else data[: self.counts[0]]
        gathered = gather_object([data], self.group)
        return [item for items, count in zip(gathered, self.counts, strict=True) for item in items[:count]]

    @property
    def is_single_process(self) -> bool:
        """Return whether one process sees all samples, so that nothing is gathered."""
        return len(self.counts) == 1

    def _gather_tensor(self, tensor: Tensor) -> Tensor:
        rows = tensor.shape[0] if tensor.dim() else 1
        lengths = self._gather_lengths(rows, tensor.device)
        per_sample = self._rows_per_sample(lengths) if tensor.dim() else 0
        if per_sample == 0 and self.is_single_process:
            return tensor
        if per_sample:
            kept = [count * per_sample for count in self.counts]
        else:
            kept = [other if count else 0 for count, (other, _) in zip(self.counts, lengths, strict=True)]
        longest = max(self.full * per_sample, *(other for other, _ in lengths))
        tensor = tensor if tensor.dim() else tensor.reshape(1)
        if rows < longest:
            tensor = torch.cat([tensor, tensor.new_zeros((longest - rows, *tensor.shape[1:]))])
        parts = (tensor if self.is_single_process else gather(tensor, self.group)).split(longest)
        return torch.cat([part[:number] for part, number in zip(parts, kept, strict=True)])

    def _gather_lengths(self, rows: int, device: torch.device) -> list[tuple[int, int]]:
        """Return for every rank the rows of its result and the samples in its batch."""
        own = (rows, self.rows)
        if self.is_single_process or not self.uneven:
            return [own] * len(self.counts)
        return [(theirs[0], theirs[1]) for theirs in gather(torch.tensor([own], device=device), self.group).tolist()]

    def _rows_per_sample(self, lengths: list[tuple[int, int]]) -> int:
        """Return the number of rows per sample, or 0 if a result is not per sample; the same on every rank.

        A result as long as a full batch has one row per sample, even if the batch is shorter:
        `loss.repeat(batch_size)` weights the mean of a batch by its samples.
        """
        if all(rows == self.full for rows, _ in lengths):
            return 1
        per_sample = {rows / samples for rows, samples in lengths}
        first = per_sample.pop()
        return int(first) if not per_sample and first.is_integer() else 0


@collective
def gather_results(data: Any, loader: Any, group: Any, *, num_ranks: int, as_objects: bool, is_spread: bool) -> Any:
    """Gather what the current batch of a loader produced, without its padding.

    Args:
        data: The results of this rank.
        loader: The loader that handed out the batch; None if there is none.
        group: The ranks that see different samples: None for all.
        num_ranks: How many those are.
        as_objects: Whether tensors are gathered as objects, too.
        is_spread: Whether results may be distributed over a mesh.
    """
    partial = None if loader is None else loader.partial_round
    as_objects = as_objects or not all(isinstance(leaf, Tensor) for leaf in leaves(data))
    if is_spread and not as_objects:
        data = recursively_apply(whole, data)
    if partial is not None:
        return partial.gather(data, as_objects)
    if num_ranks == 1:
        return data
    return gather_object(data, group) if as_objects else gather(data, group)
