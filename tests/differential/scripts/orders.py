"""The order of accelerate 1.x, which this library has where the environment asks for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ..registry import Observer, script

SIZE = 11
Make = Callable[[], DataLoader[Any]]


class Shuffled(Sampler[int]):
    """A sampler of one's own, which draws from torch's generator."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Any:
        return iter(torch.randperm(SIZE).tolist())


class ShuffledByItsGenerator(Shuffled):
    """One that draws from a generator that it is given."""

    generator: torch.Generator | None = None

    def __iter__(self) -> Any:
        return iter(torch.randperm(SIZE, generator=self.generator).tolist())


class ShuffledStream(IterableDataset[int]):
    """A stream that draws from torch's generator."""

    def __iter__(self) -> Any:
        return iter(torch.randperm(SIZE).tolist())


class StreamWithAGenerator(IterableDataset[int]):
    """A stream that draws from a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(11)

    def __iter__(self) -> Any:
        return iter(torch.randperm(SIZE, generator=self.generator).tolist())


def shuffled(**options: Any) -> Make:
    """Return a maker of shuffled loaders."""
    return lambda: DataLoader(range(SIZE), **{"batch_size": 4, "shuffle": True, **options})


def sampled(sampler: Any, **options: Any) -> Make:
    """Return a maker of loaders with a sampler."""
    return lambda: DataLoader(range(SIZE), **{"batch_size": 2, "sampler": sampler(), **options})


def order(observe: Observer, make: Make, *, epochs: tuple[int, ...] = (), seed: int | None = 7, **config: Any) -> None:
    """Observe every batch of three epochs, and what is drawn next."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import set_seed

    os.environ["MESHWRIGHT_DATA_ORDER"] = "accelerate-1"
    if seed is not None:
        set_seed(seed)  # else every rank has a seed of its own
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**config))
    loader = accelerator.prepare(make())
    for epoch in epochs or (None, None, None):
        if epoch is not None:
            loader.set_epoch(epoch)
        observe(batches=[batch.tolist() for batch in loader], drawn=torch.rand(()))


@script("one", "two")
def order_of_shuffled_loaders(observe: Observer) -> None:
    order(observe, shuffled())
    order(observe, shuffled(), seed=None)
    order(observe, shuffled(), epochs=(3, 0))
    order(observe, shuffled(drop_last=True))
    order(observe, shuffled(num_workers=1))
    order(observe, shuffled(generator=torch.Generator().manual_seed(3)))


@script("one", "two")
def order_of_divided_batches(observe: Observer) -> None:
    order(observe, shuffled(), split_batches=True)
    order(observe, shuffled(), even_batches=False)
    order(observe, shuffled(drop_last=True), split_batches=True)


@script("one", "two")
def order_of_the_seedable_sampler(observe: Observer) -> None:
    order(observe, shuffled(), use_seedable_sampler=True)
    order(observe, shuffled(), use_seedable_sampler=True, data_seed=42)
    order(observe, shuffled(), use_seedable_sampler=True, epochs=(4, 1))
    order(observe, shuffled(), use_seedable_sampler=True, split_batches=True)


@script("one", "two")
def order_of_other_samplers(observe: Observer) -> None:
    order(observe, sampled(lambda: WeightedRandomSampler([1.0] * SIZE, 9)))
    order(observe, sampled(lambda: SubsetRandomSampler(range(SIZE))))
    order(observe, sampled(lambda: RandomSampler(range(SIZE), replacement=True, num_samples=7)))
    order(observe, sampled(Shuffled))
    order(observe, sampled(ShuffledByItsGenerator))
    batches = lambda: BatchSampler(RandomSampler(range(SIZE)), 2, False)  # noqa: E731
    order(observe, lambda: DataLoader(range(SIZE), batch_sampler=batches()))


@script("one", "two")
def order_of_dispatched_loaders(observe: Observer) -> None:
    # Only full rounds: the last one is padded in another way, which is a difference of its own.
    order(observe, shuffled(drop_last=True), dispatch_batches=True)
    order(observe, shuffled(drop_last=True), dispatch_batches=True, seed=None)
    order(observe, shuffled(drop_last=True), dispatch_batches=True, split_batches=True)
    order(observe, shuffled(drop_last=True), dispatch_batches=True, use_seedable_sampler=True)
    weighted = sampled(lambda: WeightedRandomSampler([1.0] * SIZE, 9), drop_last=True)
    order(observe, weighted, dispatch_batches=True)


@script("one", "two")
def order_of_streams(observe: Observer) -> None:
    for dispatch in (False, True):
        order(observe, lambda: DataLoader(ShuffledStream(), batch_size=2, drop_last=True), dispatch_batches=dispatch)
        with_generator = lambda: DataLoader(StreamWithAGenerator(), batch_size=2, drop_last=True)  # noqa: E731
        order(observe, with_generator, dispatch_batches=dispatch)
