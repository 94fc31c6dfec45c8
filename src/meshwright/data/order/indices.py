"""Index sources that can start at any batch, for seeking in map-style data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from copy import copy
from itertools import chain, islice
from typing import Any

from torch.utils.data import BatchSampler

from .orders import OrderState, sized_sampler
from .sharding import BatchSamplerShard


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches."""

    def __init__(self, batch_sampler: Iterable[list[Any]], skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    @property
    def sampler(self) -> Any:
        """Return the sampler of the wrapped batch sampler, if it has one."""
        return getattr(self.batch_sampler, "sampler", None)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        changed: Any = copy(self.batch_sampler)  # the user's own keeps its sampler
        changed.sampler = sampler
        self.batch_sampler = changed

    def __iter__(self) -> Iterator[list[Any]]:
        return islice(iter(self.batch_sampler), self.skip_batches, None)

    @property
    def total_length(self) -> int:
        """Return the number of batches before skipping."""
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return max(0, self.total_length - self.skip_batches)


class IndexSource:
    """The batch sampler (or sampler) of the plain loader, able to start at any batch.

    One object serves the loader for its lifetime, because persistent workers keep it between epochs.
    """

    def __init__(self, samples: Any, order_state: OrderState) -> None:
        self.samples = samples
        self.order_state = order_state
        self.start = 0
        self.key: dict[str, Any] | None = None
        """The key to draw the next epoch's order from; None to draw a new one."""
        self.length_of_last_batch = 0
        """Samples in the batch drawn last, for batch samplers whose length is unknown."""
        self._drawn: Iterator[Any] | None = None

    def draw_first(self) -> None:
        """Draw the first indices now, so that the random numbers of the order are drawn now."""
        indices = self._indices()
        self._drawn = chain(list(islice(indices, 1)), indices)

    def __iter__(self) -> Iterator[Any]:
        """Yield indices. Nothing is drawn before the first `next`, because loaders with workers call `iter` twice."""
        drawn, self._drawn = self._drawn, None
        yield from self._indices() if drawn is None else drawn

    def __len__(self) -> int:
        return len(self.samples)

    def _indices(self) -> Iterator[Any]:
        """Draw the epoch's order with the first indices, as the plain loader does."""
        start, key, self.start, self.key = self.start, self.key, 0, None
        self.order_state.begin_epoch(key)
        if isinstance(self.samples, BatchSamplerShard):
            yield from self.samples.iterate_from(start)
        elif sized_sampler(self.samples) is not None:
            yield from BatchSamplerShard(self.samples, 1, 0, even_batches=False).iterate_from(start)
        else:
            for indices in islice(iter(self.samples), start, None):
                self.length_of_last_batch = len(indices) if isinstance(indices, Sized) else 0
                yield indices
