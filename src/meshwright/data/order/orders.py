"""Global orders of samples, independent of the number of processes.

An order is drawn once per epoch. Its *key* (a seed, or the state of a generator) reproduces it. The position of a
loader holds the key, so that a resumed epoch continues in the same order.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from ...runtime.loop.random import draw_seed, initial_seed_of_rank_zero, shared_seed
from .permutation import Permutation

Positions = npt.NDArray[np.int64]


class Order(Protocol):
    """The order of one epoch: samples by position."""

    def __len__(self) -> int: ...

    def at(self, positions: Positions) -> Any:
        """Return the samples at these positions as an array."""

    def finish(self) -> None:
        """Handle the end of the epoch."""


class SequentialOrder:
    """Samples in the order of the data set."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def at(self, positions: Positions) -> Positions:
        """Return the positions themselves."""
        return positions

    def finish(self) -> None:
        """Handle the end of the epoch."""


class DrawnOrder:
    """An order drawn from a sampler and held in memory."""

    def __init__(self, sampler: Any) -> None:
        self._rest = iter(sampler)
        self._samples = np.frombuffer(array("q", islice(self._rest, len(sampler))), dtype=np.int64)

    def finish(self) -> None:
        """Exhaust the sampler as the plain loader does: torch's sampler draws once more at the end of an epoch."""
        next(self._rest, None)

    def __len__(self) -> int:
        return len(self._samples)

    def at(self, positions: Positions) -> Positions:
        """Look the samples up."""
        return self._samples[positions]


class SynchronizedRandomSampler(RandomSampler):
    """A `RandomSampler` whose order is the same on every process and reproducible.

    Each epoch draws a seed as torch's own sampler does and uses that of rank 0. Any number of processes sees the order
    that the plain loader has on one process with the same seed.
    """

    def __init__(self, sampler: RandomSampler) -> None:
        super().__init__(sampler.data_source, sampler.replacement, sampler._num_samples)
        self.seed: int | None = None
        self.reads_for_all = False
        """Only this process draws the order, so the seed is not broadcast."""
        self._next_seed: int | None = None

    def set_next_seed(self, seed: int) -> None:
        """Set the seed of the next epoch."""
        self._next_seed = seed

    def __iter__(self) -> Iterator[int]:
        seed, self._next_seed = self._next_seed, None
        if seed is None:
            seed = draw_seed() if self.reads_for_all else shared_seed()
        self.seed = seed
        self.generator = torch.Generator()
        self.generator.manual_seed(self.seed)
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
        """Set the epoch of the next order."""
        self.epoch = epoch


class HugeRandomSampler(Sampler[int]):
    """A shuffled order of any number of samples in constant memory: a function of seed, epoch and position.

    Use it where `torch.randperm` of the data set would not fit: `DataLoader(data, sampler=HugeRandomSampler(data))`, or
    `DataLoaderConfiguration(constant_memory_shuffle=True)` for every shuffled loader.
    """

    def __init__(self, data_source: Any, seed: int | None = None) -> None:
        self.data_source = data_source
        self.initial_seed = seed if seed is not None else torch.random.initial_seed()
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.data_source)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next order."""
        self.epoch = epoch

    def order(self) -> Permutation:
        """Return this epoch's order, with random access."""
        return Permutation(len(self.data_source), self.initial_seed, self.epoch)

    def __iter__(self) -> Iterator[int]:
        yield from self.order()


_SIZED_SAMPLERS = (
    SequentialSampler,
    RandomSampler,
    SynchronizedRandomSampler,
    SeedableRandomSampler,
    HugeRandomSampler,
)


def sized_sampler(batch_sampler: object) -> Any:
    """Return the sampler of a plain `BatchSampler` if its length is reliable and its order can be drawn at once."""
    if type(batch_sampler) is BatchSampler and type(batch_sampler.sampler) in _SIZED_SAMPLERS:
        return batch_sampler.sampler
    return None


def innermost_sampler(loader: DataLoader[Any]) -> Any:
    """Return the innermost sampler of a loader, which determines its order."""
    found: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while (inner := getattr(found, "sampler", None)) is not None:
        found = inner
    return found


def read_order(sampler: Any) -> Order:
    """Draw one epoch's order, so that a process can index its own samples.

    Otherwise every process would iterate over the samples of all others.
    """
    if type(sampler) is SequentialSampler:
        return SequentialOrder(len(sampler))
    if type(sampler) is HugeRandomSampler:
        return sampler.order()
    return DrawnOrder(sampler)


def synchronized_sampler(
    sampler: Any, *, seedable: bool, constant_memory: bool, data_seed: int | None, keeps_torchs: bool = False
) -> Any:
    """Replace a `RandomSampler` by one with the same order on every process; return other samplers unchanged.

    A sampler with its own generator keeps it, and with `keeps_torchs` one that is to be given one; the loader
    broadcasts rank 0's state of it.
    """
    if type(sampler) is not RandomSampler:
        return sampler
    if constant_memory and not sampler.replacement and sampler._num_samples is None:
        return HugeRandomSampler(sampler.data_source, shared_seed() if data_seed is None else data_seed)
    if seedable:
        return SeedableRandomSampler(
            sampler.data_source,
            replacement=sampler.replacement,
            num_samples=sampler._num_samples,
            generator=sampler.generator,
            data_seed=initial_seed_of_rank_zero() if data_seed is None else data_seed,
        )
    return sampler if keeps_torchs or sampler.generator is not None else SynchronizedRandomSampler(sampler)


def with_sampler(batch_sampler: Any, sampler: Any) -> Any:
    """Return a copy of a batch sampler with another sampler; the user's object is not changed."""
    changed = copy.copy(batch_sampler)
    changed.sampler = sampler
    return changed


class OrderState:
    """Save and restore the key of an epoch's order.

    A key is plain data under one name: the `seed` of this epoch, the `initial_seed` of all epochs, the state of the
    sampler's own `generator`, the state dict of a stateful `sampler`, or, for other samplers, the state of torch's
    generator (`rng`) at the start of the epoch.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self._key: dict[str, Any] = {}

    def begin_epoch(self, key: dict[str, Any] | None) -> None:
        """Record the key of the order that is drawn next; with a key, restore it first."""
        if key:
            self.restore(key)
        self._key = self._key_before_drawing()

    def key(self) -> dict[str, Any]:
        """Return the key of this epoch's order."""
        if isinstance(self.sampler, SynchronizedRandomSampler):
            return {"seed": self.sampler.seed}
        return self._key

    def key_of_next_epoch(self) -> dict[str, Any]:
        """Return the key of the next epoch's order, as far as it is known."""
        return {name: value for name, value in self._key_before_drawing().items() if name != "rng"}

    def _key_before_drawing(self) -> dict[str, Any]:
        sampler = self.sampler
        if isinstance(sampler, (SynchronizedRandomSampler, SequentialSampler)):
            return {}
        if isinstance(sampler, (SeedableRandomSampler, HugeRandomSampler)):
            return {"initial_seed": sampler.initial_seed}
        if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
            return {"generator": generator.get_state()}
        if hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict"):
            return {"sampler": copy.deepcopy(sampler.state_dict())}
        return {"rng": torch.get_rng_state()}

    def restore(self, key: dict[str, Any]) -> None:
        """Set up the sampler so that the next order is that of a key."""
        sampler = self.sampler
        if key.get("seed") is not None and isinstance(sampler, SynchronizedRandomSampler):
            sampler.set_next_seed(key["seed"])
        elif "initial_seed" in key and hasattr(sampler, "initial_seed"):
            sampler.initial_seed = key["initial_seed"]
        elif "generator" in key and getattr(sampler, "generator", None) is not None:
            sampler.generator.set_state(key["generator"])
        elif "sampler" in key and hasattr(sampler, "load_state_dict"):
            sampler.load_state_dict(key["sampler"])
        elif "rng" in key:
            torch.set_rng_state(key["rng"])
