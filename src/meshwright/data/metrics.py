"""Gather the results of a round without its padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..runtime.collectives.nested import honor_mapping, is_namedtuple, leaves, map_children, recursively_apply
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
        own = 0 if self.is_single_process else dist.get_rank(self.group)
        return gather_objects(self._without_padding(data, self.counts[own]), self.counts, self.group)

    def _without_padding(self, data: Any, count: int) -> Any:
        """Return the part of this rank's results that belongs to its first, real samples."""
        if _is_array(data) or _is_plain_sequence(data):
            kept = self._kept(data, count)
            if kept is not None and not self._is_structure(data):
                return data[:kept]
        mapped = map_children(lambda child: self._without_padding(child, count), data)
        return data if mapped is None else mapped

    def _kept(self, data: Any, count: int) -> int | None:
        """Return how many of its entries belong to the first samples; None if the result is not per sample."""
        if not len(data):
            return None
        if len(data) == self.full:
            return count
        per_sample, rest = divmod(len(data), max(self.rows, 1))
        return None if rest else count * per_sample

    def _is_structure(self, data: Any) -> bool:
        """Return whether a sequence holds several results rather than one entry per sample: as `(scores, texts)`."""
        if not _is_plain_sequence(data):
            return False
        arrays = [item for item in data if _is_array(item)]
        several_kinds = isinstance(data, tuple) or len(arrays) < len(data)
        return several_kinds and any(self._kept(array, 0) is not None for array in arrays)

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


def _is_array(data: Any) -> bool:
    """Return whether this is a tensor or an array with rows."""
    return hasattr(data, "__array__") and getattr(data, "ndim", 0) > 0


def _is_plain_sequence(data: Any) -> bool:
    return isinstance(data, (list, tuple)) and not is_namedtuple(data)


def gather_objects(data: Any, counts: list[int], group: Any) -> Any:
    """Gather results that are not all tensors from every rank that has a real sample.

    The items of every rank become one list. Of mappings and dataclasses, each value is gathered by itself, so that a
    result has the form that it has on one process.
    """
    if len(counts) == 1:
        return data
    if not isinstance(data, Mapping) and not dataclasses.is_dataclass(data):
        own = counts[dist.get_rank(group)]
        return gather_object(data if own else [], group)
    gathered = gather_object([data], group)
    return _joined([each for each, count in zip(gathered, counts, strict=True) if count])


def _joined(values: list[Any]) -> Any:
    """Join the results of the ranks: tensors and lists one after the other, single values as a list."""
    first = values[0]
    if isinstance(first, Mapping):
        return honor_mapping(first, {key: _joined([value[key] for value in values]) for key in first})
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        fields = [field.name for field in dataclasses.fields(first) if field.init]
        return dataclasses.replace(
            first, **{name: _joined([getattr(value, name) for value in values]) for name in fields}
        )
    return _joined_rows(values)


def _joined_rows(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        rows = [(value if value.dim() else value.reshape(1)).to(first.device) for value in values]
        return torch.cat(rows) if len({row.shape[1:] for row in rows}) == 1 else rows
    if _is_array(first):
        return np.concatenate(values) if len({value.shape[1:] for value in values}) == 1 else values
    return type(first)(item for value in values for item in value) if _is_plain_sequence(first) else values


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
    if as_objects:
        return gather_objects(data, [1] * num_ranks, group)
    return data if num_ranks == 1 else gather(data, group)
