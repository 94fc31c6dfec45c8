"""Let a script read its real data, and give it fake batches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from .....data import already_split
from .....data.order import orders
from .progress import LoaderPass
from .values import Values

_SEED = 0
"""Of the order of shuffled data. Only shapes count."""


class Batches:
    """What a script's loaders gave since the last step."""

    def __init__(self) -> None:
        self.samples = 0
        self.tokens = 0
        self.fraction = 1.0
        """The part of each batch that the script gets; whole batches are counted."""
        self.loaded: list[LoaderPass] = []
        """What every pass over a loader has given."""

    def count(self, batch: Any) -> int:
        """Count samples, the rows of the first tensor, and tokens, the elements of the largest of whole numbers.

        A list without tensors, such as of prompts, has one sample per item.
        Returns the samples of this batch.
        """
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0]
        samples = tensors[0].shape[0] if tensors else len(batch) if isinstance(batch, list) else 0
        self.samples += samples
        whole = [t.numel() for t in tensors if t.dim() > 1 and t.dtype in (torch.int64, torch.int32)]
        self.tokens += max(whole, default=0)
        return samples

    def take(self) -> tuple[int, int]:
        """Return samples and tokens, and begin again."""
        taken = self.samples, self.tokens
        self.samples = self.tokens = 0
        return taken


def give_fake_batches(recorder: Any, values: Values, batches: Batches, batch_size: int | None = None) -> None:
    """Read data as usual, in this process; hand out tensors of the same shapes, with their whole numbers beside.

    Batches have `batch_size` samples, if it is given, instead of what the loader gives.
    """
    for name in ("draw_seed", "shared_seed", "initial_seed_of_rank_zero"):
        setattr(orders, name, lambda: _SEED)  # ranks agree on one by tensors, which are fake here
    already_split._differs_between_ranks = lambda dataset, process_index: False  # nobody else is here to compare with
    plain_init, plain_iter = DataLoader.__init__, DataLoader.__iter__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs |= {"num_workers": 0, "pin_memory": False, "persistent_workers": False}
        for name in ("prefetch_factor", "multiprocessing_context"):
            kwargs.pop(name, None)
        plain_init(self, *args[:5], **kwargs)

    def iterate(self: Any) -> Iterator[Any]:
        with recorder.muted(), unset_fake_temporarily():
            iterator = plain_iter(self)
        loaded = LoaderPass(_length(self.dataset))
        batches.loaded.append(loaded)
        while True:
            try:
                with recorder.muted(), unset_fake_temporarily():
                    batch = next(iterator)
            except StopIteration:
                return
            with recorder.muted(), unset_fake_temporarily():
                batch = _resized(batch, batch_size)
            loaded.batch_size = max(loaded.batch_size, batches.count(batch))
            loaded.batches += 1
            yield tree_map(partial(_faked, values, batches.fraction), batch)

    DataLoader.__init__, DataLoader.__iter__ = init, iterate  # type: ignore[method-assign, assignment]


def _length(dataset: Any) -> int | None:
    """Return the number of samples; data that is iterated need not have one."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _resized(batch: Any, samples: int | None) -> Any:
    """Return a batch of another size: every tensor with one row per sample gets or loses rows."""
    rows = next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0), None)
    if samples is None or rows is None or rows == samples:
        return batch

    def resized(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(leaf) != rows:
            return leaf
        return leaf[torch.arange(samples) % rows]

    return tree_map(resized, batch)


def _faked(values: Values, fraction: float, leaf: Any) -> Any:
    if type(leaf) is not Tensor and not isinstance(leaf, FakeTensor):
        return leaf
    if fraction < 1 and leaf.dim() > 0:
        leaf = leaf[: max(1, round(leaf.shape[0] * fraction))]
    hidden = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)
    if type(leaf) is Tensor:
        values.keep(hidden, leaf)
    return hidden
