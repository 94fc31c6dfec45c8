"""Recognise data that every rank has cut for itself.

Such data must not be divided again: most of it would be lost. Data that is whole on every rank must be divided: each
rank would repeat it otherwise. So only what states a split counts. A fingerprint of a Hugging Face data set does not:
it hashes the functions that were given to `map` and `filter`, and differs between ranks where these hold a rank or
cannot be pickled. Neither does a sample that differs: whoever augments at random gets another one on every rank.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

from ..errors.callers import warn
from ..runtime.group.runtime import Runtime
from .loaders.base import length_of
from .order.orders import innermost_sampler

_ROWS = 16  # of a Hugging Face data set, compared between ranks


def declared_split(loader: DataLoader[Any], process_index: int) -> str | None:
    """Return what says that this data is split by rank, in words; None where it is whole. Call it on every rank."""
    dataset: Any = loader.dataset
    if isinstance(innermost_sampler(loader), DistributedSampler):
        return "a DistributedSampler"
    if getattr(dataset, "_distributed", None) is not None:
        return "a data set split by node"
    return "another data set on every rank" if _differs_between_ranks(dataset, process_index) else None


@dataclass(frozen=True)
class _Description:
    """What a rank tells the others of its data."""

    kind: str
    length: int | None
    subset: str | None
    """A checksum of the indices of a `Subset`."""
    columns: dict[str, str]
    """Checksums of rows as a Hugging Face data set stores them, for the columns that vary."""


def _differs_between_ranks(dataset: Any, process_index: int) -> bool:
    if Runtime.current().num_processes == 1 or not dist.is_initialized():
        return False
    indices = _subset_indices(dataset)
    mine = _Description(
        type(dataset).__qualname__,
        length_of(dataset),
        None if indices is None else _checksum(indices),
        {} if indices is not None else _stored_columns(dataset),
    )
    per_process = _all_gather_by_process(process_index, mine)
    if len({(one.kind, one.length) for one in per_process}) > 1:
        return True
    if len({one.subset for one in per_process}) > 1:
        return _are_disjoint(_all_gather_by_process(process_index, indices or []))
    return _all_columns_differ([one.columns for one in per_process])


def _all_columns_differ(per_process: list[dict[str, str]]) -> bool:
    """Tell whether every process has rows of its own: a random `map` leaves some column alike, a split leaves none."""
    seen = [(name, checksum) for columns in per_process for name, checksum in columns.items()]
    return all(per_process) and len(set(seen)) == len(seen)


def _are_disjoint(per_process: list[list[int]]) -> bool:
    """Tell whether no sample is in two subsets; warn of subsets that overlap but are not the same."""
    subsets = [set(indices) for indices in per_process]
    if len(set().union(*subsets)) == sum(map(len, subsets)):
        return True
    warn(
        "The ranks have different subsets of the data, which overlap: they are divided as if they were the same, so "
        "some samples are seen twice in an epoch and others never. Split the data alike on every rank, with "
        "random_split(..., generator=torch.Generator().manual_seed(0)), or without overlaps."
    )
    return False


def _all_gather_by_process(process_index: int, mine: Any) -> list[Any]:
    """Exchange something between processes that see different samples; of those that see the same, the last counts."""
    per_rank: list[Any] = [None] * Runtime.current().num_processes
    dist.all_gather_object(per_rank, (process_index, mine))
    return list(dict(per_rank).values())


def _subset_indices(dataset: Any) -> list[int] | None:
    """Return the indices of a `Subset`, of a subset of a subset too, into the data underneath; None for others."""
    if not isinstance(dataset, Subset):
        return None
    inner = _subset_indices(dataset.dataset)
    own: Sequence[Any] = dataset.indices
    return [int(index) if inner is None else inner[int(index)] for index in own]


def _stored_columns(dataset: Any) -> dict[str, str]:
    """Return a checksum per column of a few rows of a map-style Hugging Face data set; nothing for other data.

    The rows are read as they are stored, without the transformations that `dataset[i]` makes. A column that is the same
    in all of them is left out, because it says nothing.
    """
    library: Any = sys.modules.get("datasets")
    if library is None or not isinstance(dataset, library.Dataset) or len(dataset) == 0:
        return {}
    places = sorted({len(dataset) * number // _ROWS for number in range(_ROWS)})
    columns = dataset.with_format("arrow")[places].to_pydict()
    return {name: _checksum(values) for name, values in columns.items() if len(set(map(repr, values))) > 1}


def _checksum(values: list[Any]) -> str:
    return hashlib.blake2b(repr(values).encode(), digest_size=16).hexdigest()
