"""Which sample comes when: global orders that know nothing of the number of processes.

An order is drawn once per epoch. What draws the same one again (a seed, or a generator's state) is its *key*; a
loader's position remembers it, so that a resumed epoch goes on in the order it began with.
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

from ...runtime.loop.random import initial_seed_of_rank_zero, own_seed, shared_seed
from .permutation import Permutation

Positions = npt.NDArray[np.int64]


class Order(Protocol):
    """One epoch's samples by their position."""

    def __len__(self) -> int: ...

    def at(self, positions: Positions) -> Any:
        """Return the samples at these positions, as an array."""

    def finish(self) -> None:
        """Take note that the last sample was read."""


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
        """Take note that the last sample was read."""


class DrawnOrder:
    """Samples in an order that was drawn and is kept."""

    def __init__(self, sampler: Any) -> None:
        self._rest = iter(sampler)
        self._samples = np.frombuffer(array("q", islice(self._rest, len(sampler))), dtype=np.int64)

    def finish(self) -> None:
        """Exhaust the sampler, as the plain loader does at the end of an epoch: torch's own draws once more there."""
        next(self._rest, None)

    def __len__(self) -> int:
        return len(self._samples)

    def at(self, positions: Positions) -> Positions:
        """Look the samples up."""
        return self._samples[positions]


class SynchronizedRandomSampler(RandomSampler):
    """A `RandomSampler` whose order is the same on every process and can be drawn again.

    Each epoch draws its seed as torch's own sampler does and takes that of rank 0, so one process and many see the
    very order that the plain loader would have had on one process with the same seed.
    """

    def __init__(self, sampler: RandomSampler) -> None:
        super().__init__(sampler.data_source, sampler.replacement, sampler._num_samples)
        self.seed: int | None = None
        self.reads_for_all = False
        """Only this process draws the order, so there is nobody to agree with."""
        self._next_seed: int | None = None

    def set_next_seed(self, seed: int) -> None:
        """Let the next epoch have the order of this seed."""
        self._next_seed = seed

    def __iter__(self) -> Iterator[int]:
        seed, self._next_seed = self._next_seed, None
        if seed is None:
            seed = own_seed() if self.reads_for_all else shared_seed()
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
        """Choose the epoch whose order comes next."""
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
        """Choose the epoch whose order comes next."""
        self.epoch = epoch

    def order(self) -> Permutation:
        """Return this epoch's order, to be read at any position."""
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
    """Return the sampler under a plain `BatchSampler` if its length can be trusted and it can be read at once."""
    if type(batch_sampler) is BatchSampler and type(batch_sampler.sampler) in _SIZED_SAMPLERS:
        return batch_sampler.sampler
    return None


def innermost_sampler(loader: DataLoader[Any]) -> Any:
    """Return the sampler that decides a loader's order, under whatever makes batches of it."""
    found: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while (inner := getattr(found, "sampler", None)) is not None:
        found = inner
    return found


def read_order(sampler: Any) -> Order:
    """Draw one epoch's order, so that a process reads its own samples by position.

    Without this, every process would iterate over every other process's samples: work that grows with their number.
    """
    if type(sampler) is SequentialSampler:
        return SequentialOrder(len(sampler))
    if type(sampler) is HugeRandomSampler:
        return sampler.order()
    return DrawnOrder(sampler)


def synchronized_sampler(sampler: Any, *, seedable: bool, constant_memory: bool, data_seed: int | None) -> Any:
    """Replace a random sampler by one that agrees across processes; leave others as they are.

    A sampler with a generator of its own keeps it: the loader gives every process rank 0's state of it.
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
    return SynchronizedRandomSampler(sampler) if sampler.generator is None else sampler


def with_sampler(batch_sampler: Any, sampler: Any) -> Any:
    """Return a batch sampler like this one over another sampler; the user's own object stays as it is."""
    changed = copy.copy(batch_sampler)
    changed.sampler = sampler
    return changed


class OrderState:
    """Remember what an epoch's order was drawn from, and let it be drawn again.

    A key is plain data under one name: the `seed` of this epoch, the `initial_seed` of all epochs, the state of the
    sampler's own `generator`, the state that a `sampler` keeps itself, or, for samplers nobody knows, the state of
    torch's generator (`rng`) when the epoch began.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self._key: dict[str, Any] = {}

    def begin_epoch(self, key: dict[str, Any] | None) -> None:
        """Note what the order will be drawn from; with a key, draw from what it holds."""
        if key:
            self.restore(key)
        self._key = self._key_before_drawing()

    def key(self) -> dict[str, Any]:
        """Return what draws this epoch's order again."""
        if isinstance(self.sampler, SynchronizedRandomSampler):
            return {"seed": self.sampler.seed}
        return self._key

    def key_of_next_epoch(self) -> dict[str, Any]:
        """Return what is known already of the order that comes after this epoch's."""
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
        """Let the next order be drawn from what a key holds."""
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
