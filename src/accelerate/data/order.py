"""Which sample comes when: global orders that know nothing of the number of processes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from ..runtime.random import shared_seed


class SynchronizedRandomSampler(RandomSampler):
    """A `RandomSampler` whose order is the same on every process.

    Each epoch draws its seed as torch's own sampler does and takes that of rank 0, so one process and many see the
    very order that the plain loader would have had on one process with the same seed.
    """

    def __init__(self, sampler: RandomSampler) -> None:
        super().__init__(sampler.data_source, sampler.replacement, sampler._num_samples)

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator()
        self.generator.manual_seed(shared_seed())
        yield from super().__iter__()


class SeedableRandomSampler(RandomSampler):
    """A `RandomSampler` whose order is a function of its seed and the epoch.

    The seed is `data_seed`, or the seed of torch's generator where none is given.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = data_seed if data_seed is not None else torch.random.initial_seed()
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.epoch + self.initial_seed)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next."""
        self.epoch = epoch


def synchronized(sampler: Sampler[Any] | None, *, seedable: bool, data_seed: int | None) -> Sampler[Any] | None:
    """Replace a random sampler by one that agrees across processes; leave others as they are.

    A sampler with a generator of its own keeps it: the loader gives every process rank 0's state of it.
    """
    if type(sampler) is not RandomSampler:
        return sampler
    if seedable:
        return SeedableRandomSampler(
            sampler.data_source,
            replacement=sampler.replacement,
            num_samples=sampler._num_samples,
            generator=sampler.generator,
            data_seed=data_seed,
        )
    return SynchronizedRandomSampler(sampler) if sampler.generator is None else sampler


_SIZED_SAMPLERS = (SequentialSampler, RandomSampler, SynchronizedRandomSampler, SeedableRandomSampler)


def sized_sampler(batch_sampler: object) -> Sampler[Any] | None:
    """Return the sampler under a plain `BatchSampler` if its length can be trusted and it can be read at once."""
    if type(batch_sampler) is BatchSampler and type(batch_sampler.sampler) in _SIZED_SAMPLERS:
        return batch_sampler.sampler  # type: ignore[return-value]
    return None


def read_order(sampler: Sampler[Any]) -> Sequence[int]:
    """Return one epoch's order as a compact sequence, so that a process reads its own samples by position.

    Without this, every process would iterate over every other process's samples: work that grows with their number.
    """
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    return array("q", sampler)
