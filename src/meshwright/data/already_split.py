"""Detect data that is already sharded by rank.

Sharding such data again would lose most of it. Data that is complete on every rank must be sharded, or every rank would
repeat it. Only an explicit split counts. The fingerprint of a Hugging Face data set is no evidence: it hashes the
functions given to `map` and `filter`, and differs between ranks where these hold a rank or cannot be pickled. A sample
that differs is no evidence either: random augmentation makes another one on every rank.
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
    """Describe how this data is sharded by rank, or return None if it is not. Collective: call it on every rank."""
    dataset: Any = loader.dataset
    if isinstance(innermost_sampler(loader), DistributedSampler):
        return "a DistributedSampler"
    if getattr(dataset, "_distributed", None) is not None:
        return "a data set split by node"
    return "another data set on every rank" if _differs_between_ranks(dataset, process_index) else None


@dataclass(frozen=True)
class _Description:
    """Describe the data of one rank; exchanged between ranks."""

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
    own = _Description(
        type(dataset).__qualname__,
        length_of(dataset),
        None if indices is None else _checksum(indices),
        {} if indices is not None else _stored_columns(dataset),
    )
    per_process = _all_gather_by_process(process_index, own)
    if len({(one.kind, one.length) for one in per_process}) > 1:
        return True
    if len({one.subset for one in per_process}) > 1:
        return _are_disjoint(_all_gather_by_process(process_index, indices or []))
    return _all_columns_differ([one.columns for one in per_process])


def _all_columns_differ(per_process: list[dict[str, str]]) -> bool:
    """Return whether no two processes agree on any column. A random `map` leaves some columns equal, a split none."""
    seen = [(name, checksum) for columns in per_process for name, checksum in columns.items()]
    return all(per_process) and len(set(seen)) == len(seen)


def _are_disjoint(per_process: list[list[int]]) -> bool:
    """Return whether no sample is in two subsets. Warn about subsets that overlap but differ."""
    subsets = [set(indices) for indices in per_process]
    if len(set().union(*subsets)) == sum(map(len, subsets)):
        return True
    warn(
        "The ranks have different subsets of the data, which overlap: they are divided as if they were the same, so "
        "some samples are seen twice in an epoch and others never. Split the data alike on every rank, with "
        "random_split(..., generator=torch.Generator().manual_seed(0)), or without overlaps."
    )
    return False


def _all_gather_by_process(process_index: int, own: Any) -> list[Any]:
    """Gather one object per data rank. Of processes that see the same samples, the last one counts."""
    per_rank: list[Any] = [None] * Runtime.current().num_processes
    dist.all_gather_object(per_rank, (process_index, own))
    return list(dict(per_rank).values())


def _subset_indices(dataset: Any) -> list[int] | None:
    """Return the indices of a `Subset` (nested ones too) into the underlying data, or None for other data."""
    if not isinstance(dataset, Subset):
        return None
    inner = _subset_indices(dataset.dataset)
    own: Sequence[Any] = dataset.indices
    return [int(index) if inner is None else inner[int(index)] for index in own]


def _stored_columns(dataset: Any) -> dict[str, str]:
    """Return a checksum per column over a few rows of a map-style Hugging Face data set; nothing for other data.

    The rows are read as stored, without the transforms that `dataset[i]` applies. Columns that are constant over these
    rows are left out.
    """
    library: Any = sys.modules.get("datasets")
    if library is None or not isinstance(dataset, library.Dataset) or len(dataset) == 0:
        return {}
    places = sorted({len(dataset) * number // _ROWS for number in range(_ROWS)})
    columns = dataset.with_format("arrow")[places].to_pydict()
    return {name: _checksum(values) for name, values in columns.items() if len(set(map(repr, values))) > 1}


def _checksum(values: list[Any]) -> str:
    return hashlib.blake2b(repr(values).encode(), digest_size=16).hexdigest()
