"""Prepared data loaders: the same `DataLoader`, its share of the data, on the right device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from ..config.enums import RNGType
from ..config.settings import NOT_YET
from ..errors import UnsupportedSettingError
from ..runtime import device as devices
from ..runtime.gradient_state import GradientState
from ..runtime.nested import send_to_device
from ..runtime.random import synchronize_rng_states
from ..runtime.runtime import Runtime
from .order import sized_sampler, synchronized
from .sharding import BatchSamplerShard, IterableDatasetShard

_LOADER_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches."""

    def __init__(self, batch_sampler: Iterable[list[Any]], skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """Return the sampler of the wrapped batch sampler, if it has one."""
        return getattr(self.batch_sampler, "sampler", None)

    def __iter__(self) -> Iterator[list[Any]]:
        for index, batch in enumerate(self.batch_sampler):
            if index >= self.skip_batches:
                yield batch

    @property
    def total_length(self) -> int:
        """Return the number of batches before skipping."""
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return max(0, self.total_length - self.skip_batches)


class DataLoaderShard(DataLoader[Any]):
    """A `DataLoader` that knows its place among the processes and tells the training loop where it is."""

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: Sequence[RNGType | str] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        if use_stateful_dataloader:
            raise UnsupportedSettingError("use_stateful_dataloader=True", NOT_YET, "Leave it out.")
        super().__init__(dataset, **kwargs)
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self.iteration = iteration
        self.gradient_state = GradientState()
        self.end_of_dataloader = False
        self.remainder = -1
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking

    @property
    def total_batch_size(self) -> int:
        """Return the samples that all processes consume in one step."""
        shard = self._shard
        if shard is not None and shard.batch_size is not None:
            return shard.batch_size if shard.split_batches else shard.batch_size * shard.num_processes
        if isinstance(self.dataset, IterableDatasetShard):
            return self.dataset._round_size
        return getattr(self.batch_sampler, "batch_size", None) or self.batch_size or 1

    @property
    def total_dataset_length(self) -> int:
        """Return the samples that one epoch hands out, over all processes."""
        source: Any = self.dataset.dataset if isinstance(self.dataset, IterableDatasetShard) else self.dataset
        sampler = getattr(self.batch_sampler, "sampler", None)
        return len(sampler if sampler is not None and hasattr(sampler, "__len__") else source)

    @property
    def _shard(self) -> BatchSamplerShard | None:
        found: Any = self.batch_sampler
        if isinstance(found, SkipBatchSampler):
            found = found.batch_sampler
        return found if isinstance(found, BatchSamplerShard) else None

    def get_sampler(self) -> Any:
        """Return the sampler that decides the order."""
        return getattr(self.batch_sampler, "sampler", None) or self.sampler

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, for whatever under this loader wants to know it."""
        self.iteration = epoch
        parts: tuple[Any, ...] = (self.batch_sampler, self.get_sampler(), self.dataset)
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def begin(self) -> None:
        """Announce to the training loop that this loader is being iterated."""
        self.end_of_dataloader = False
        self.remainder = -1
        if not self._drop_last:
            try:
                self.remainder = self.total_dataset_length % self.total_batch_size
            except TypeError:  # data of unknown length
                self.remainder = -1
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """Announce that the iteration is over."""
        self.gradient_state._remove_dataloader(self)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.rng_types is not None:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        self.set_epoch(self.iteration)
        self.begin()
        try:
            yield from self._batches()
        finally:
            self.iteration += 1
            self.end()

    def _batches(self) -> Iterator[Any]:
        batches: Iterator[Any] = super().__iter__()
        if self.skip_batches and not isinstance(self.batch_sampler, SkipBatchSampler):
            for _ in range(self.skip_batches):
                next(batches, None)
        place = self._placement()
        last = self._last_index()
        if last is None:
            for batch, is_last in _marking_last(batches):
                self.end_of_dataloader = is_last
                yield batch if place is None else place(batch)
            return
        for index, batch in enumerate(batches):
            if index == last:
                self.end_of_dataloader = True
            yield batch if place is None else place(batch)

    def _placement(self) -> Callable[[Any], Any] | None:
        device = self.device
        if device is None or devices.is_cpu(device):
            return None  # batches are made on the CPU
        return lambda batch: send_to_device(batch, device, non_blocking=self._non_blocking)

    def _last_index(self) -> int | None:
        """Return the index of the last batch, where the length can be trusted.

        Elsewhere a batch is read ahead to find out. That is avoided where possible because reading ahead draws random
        numbers (augmentation) earlier than the plain loader would.
        """
        shard = self._shard
        inner = shard.batch_sampler if shard is not None else self.batch_sampler
        if isinstance(inner, SkipBatchSampler):
            inner = inner.batch_sampler
        return len(self) - 1 if sized_sampler(inner) is not None and not self.skip_batches else None


def _marking_last(items: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Pair every item with whether it is the last, reading one item ahead."""
    try:
        held = next(items)
    except StopIteration:
        return
    for item in items:
        yield held, False
        held = item
    yield held, True


def loader_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the options with which a like loader can be built."""
    return {name: getattr(loader, name) for name in _LOADER_OPTIONS if hasattr(loader, name)}


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[RNGType | str] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> DataLoaderShard:
    """Return a loader that hands this process its share of the data, placed on `device` if asked for."""
    if isinstance(dataloader, DataLoaderShard):
        return dataloader
    if dispatch_batches:
        raise UnsupportedSettingError("dispatch_batches=True", NOT_YET, "Leave it out: each process reads its share.")
    runtime = Runtime.current()
    num_processes = runtime.num_processes if num_processes is None else num_processes
    process_index = runtime.process_index if process_index is None else process_index
    if type(dataloader).__iter__ is not DataLoader.__iter__:
        warnings.warn(
            f"{type(dataloader).__name__} overrides DataLoader.__iter__; the prepared loader is built from its "
            "dataset, sampler and options, and does not call that method.",
            stacklevel=2,
        )

    options = loader_options(dataloader)
    dataset = dataloader.dataset
    generator: torch.Generator | None = None
    drop_last = bool(dataloader.drop_last)
    if isinstance(dataset, IterableDataset):
        if num_processes > 1:
            if dataloader.batch_size is None:
                raise UnsupportedSettingError(
                    "batch_size=None with an iterable data set on several processes",
                    NOT_YET,
                    "Give a batch_size.",
                )
            dataset = IterableDatasetShard(
                dataset, dataloader.batch_size, drop_last, num_processes, process_index, split_batches
            )
        share = dataloader.batch_size
        if split_batches and share is not None:
            share //= num_processes
        options |= {"batch_size": share, "drop_last": drop_last}
    elif dataloader.batch_sampler is None:
        if num_processes > 1:
            raise UnsupportedSettingError("batch_size=None on several processes", NOT_YET, "Give a batch_size.")
        options |= {"sampler": dataloader.sampler, "batch_size": None}
    else:
        batch_sampler, generator = _shared_out(
            dataloader.batch_sampler,
            num_processes,
            process_index,
            split_batches=split_batches,
            even_batches=even_batches,
            seedable=use_seedable_sampler,
            data_seed=data_seed,
        )
        drop_last = bool(getattr(batch_sampler, "drop_last", False))
        options["batch_sampler"] = batch_sampler
    return DataLoaderShard(
        dataset,
        device=device if put_on_device else None,
        rng_types=_synchronizable(rng_types, generator, num_processes),
        synchronized_generator=generator,
        use_stateful_dataloader=use_stateful_dataloader,
        _drop_last=drop_last,
        _non_blocking=non_blocking,
        **options,
    )


def _shared_out(
    batch_sampler: Any,
    num_processes: int,
    process_index: int,
    *,
    split_batches: bool,
    even_batches: bool,
    seedable: bool,
    data_seed: int | None,
) -> tuple[Any, torch.Generator | None]:
    """Return this process's batch sampler, and the user's generator that must agree across processes."""
    if num_processes == 1 and not seedable:
        return batch_sampler, None  # the plain loader's order, to the bit
    sampler: Any = getattr(batch_sampler, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        warnings.warn(
            "This data loader already has a DistributedSampler: it is used as it is, and not divided again.",
            stacklevel=3,
        )
        return batch_sampler, None
    agreed: Any = synchronized(sampler, seedable=seedable, data_seed=data_seed)
    if agreed is not sampler:
        batch_sampler = BatchSampler(agreed, batch_sampler.batch_size, batch_sampler.drop_last)
    elif num_processes > 1 and getattr(agreed, "generator", agreed) is None:
        agreed.generator = torch.Generator()  # a weighted or subset sampler would draw differently on each process
        agreed.generator.manual_seed(torch.random.initial_seed())
    if num_processes > 1:
        batch_sampler = BatchSamplerShard(batch_sampler, num_processes, process_index, split_batches, even_batches)
    own_generator = getattr(agreed, "generator", None) if agreed is sampler else None
    return batch_sampler, own_generator


def _synchronizable(
    rng_types: Sequence[RNGType | str] | None, generator: torch.Generator | None, num_processes: int
) -> list[RNGType | str] | None:
    """Drop the generators that are not there; None where nothing is left to synchronise."""
    if num_processes == 1 or rng_types is None:
        return None
    kept = [kind for kind in rng_types if generator is not None or str(kind) != RNGType.GENERATOR]
    return kept or None


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoaderShard:
    """Return a loader like this one that starts after its first batches."""
    options = loader_options(dataloader)
    if dataloader.batch_sampler is None or isinstance(dataloader.dataset, IterableDataset):
        options |= {"batch_size": dataloader.batch_size}
        if not isinstance(dataloader.dataset, IterableDataset):
            options["sampler"] = dataloader.sampler
        else:
            options["drop_last"] = dataloader.drop_last
        options["skip_batches"] = num_batches
    else:
        options["batch_sampler"] = SkipBatchSampler(dataloader.batch_sampler, skip_batches=num_batches)
    if isinstance(dataloader, DataLoaderShard):
        options |= {
            "device": dataloader.device,
            "rng_types": dataloader.rng_types,
            "synchronized_generator": dataloader.synchronized_generator,
            "iteration": dataloader.iteration,
            "_drop_last": dataloader._drop_last,
            "_non_blocking": dataloader._non_blocking,
        }
    return DataLoaderShard(dataloader.dataset, **options)
