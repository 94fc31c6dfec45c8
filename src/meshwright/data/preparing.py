"""Prepare plain `DataLoader`s: shard or dispatch their data, and skip batches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ..config.enums import DataOrder, RNGType
from ..errors import UnsupportedSettingError
from ..errors.callers import warn
from ..runtime.group.runtime import Runtime
from ..runtime.loop.random import draw_seed
from .already_split import declared_split
from .loaders.base import PreparedLoader
from .loaders.dispatch import DataLoaderDispatcher
from .loaders.shard import DataLoaderShard
from .loaders.streams import IterableDatasetShard, MarkingCollate
from .order.indices import SkipBatchSampler
from .order.orders import synchronized_sampler, with_sampler
from .order.sharding import BatchSamplerShard

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


def loader_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the options to build an equivalent loader."""
    return {name: getattr(loader, name) for name in _LOADER_OPTIONS if hasattr(loader, name)}


def samples_per_process(loader: DataLoader[Any], num_processes: int, split_batches: bool) -> int | None:
    """Return the number of samples per process and step of a plain or prepared loader."""
    if isinstance(loader, PreparedLoader):
        return loader.total_batch_size // loader.num_processes
    own: int | None = getattr(loader.batch_sampler, "batch_size", None) or loader.batch_size
    return own // num_processes if own is not None and split_batches else own


def in_larger_batches(loader: DataLoader[Any], times: int) -> DataLoader[Any]:
    """Return a loader like this one, each of whose batches has as many samples as `times` of this one's."""
    if times == 1:
        return loader
    if loader.batch_size is None:
        raise ValueError(
            f"This data loader makes its batches itself (batch_size=None), so {times} micro-batches cannot be made of "
            "one: give it a batch_size, that of one micro-batch."
        )
    options = loader_options(loader) | {"batch_size": loader.batch_size * times, "drop_last": loader.drop_last}
    if not isinstance(loader.dataset, IterableDataset):
        options["sampler"] = loader.sampler
    return DataLoader(loader.dataset, **options)


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
    *,
    constant_memory_shuffle: bool = False,
    order: DataOrder = DataOrder.ONE_PROCESS,
) -> PreparedLoader:
    """Return a loader that yields this process's shard of the data, on `device` if one is given."""
    if isinstance(dataloader, SkipDataLoader):
        dataloader = dataloader.undivided()
    if isinstance(dataloader, PreparedLoader):
        return dataloader
    runtime = Runtime.current()
    num_processes = runtime.num_processes if num_processes is None else num_processes
    process_index = runtime.process_index if process_index is None else process_index
    _warn_of_overridden_iter(dataloader, use_stateful_dataloader)
    is_stream = isinstance(dataloader.dataset, IterableDataset)
    presharded = num_processes > 1 and _is_split_by_rank(dataloader, process_index)
    obstacle = _obstacle_to_dispatching(presharded, num_processes != runtime.num_processes)
    is_dispatched = _dispatches(dispatch_batches, is_stream and put_on_device, obstacle)
    num_synchronized = max(num_processes, runtime.num_processes)  # ranks that share samples must draw the same ones
    as_in_1 = order == DataOrder.ACCELERATE_1 and num_synchronized > 1
    synchronized = _synchronized_order(
        dataloader,
        num_synchronized,
        draw_seed_of_generator=_seeds_of_generators(as_in_1, is_dispatched),
        keeps_torchs=as_in_1 and not is_dispatched,
        seedable=use_seedable_sampler,
        constant_memory=constant_memory_shuffle,
        data_seed=data_seed,
    )
    batching = dataloader if synchronized.batch_sampler is None else synchronized.batch_sampler
    common: dict[str, Any] = {
        "device": device if put_on_device else None,
        "_drop_last": bool(getattr(batching, "drop_last", False)),
        "_non_blocking": non_blocking,
    }
    sharding = _Sharding(num_processes, process_index, split_batches, even_batches)
    if is_dispatched:
        inputs = sharding.of_all(dataloader, synchronized)
        dispatcher = DataLoaderDispatcher(
            inputs.dataset,
            split_batches=split_batches,
            slice_fn=slice_fn_for_dispatch,
            use_stateful_dataloader=use_stateful_dataloader,
            **common,
            **{**loader_options(dataloader), **inputs.options},
        )
        dispatcher.draws_as_reader = as_in_1
        return dispatcher
    divide = sharding.of_split_data if presharded else sharding.of_loader
    inputs = divide(dataloader, synchronized)
    if as_in_1 and isinstance(inputs.dataset, IterableDatasetShard) and not inputs.is_split:
        inputs.dataset.seeds_generator = True
    return DataLoaderShard(
        inputs.dataset,
        rng_types=_synchronizable(rng_types, synchronized.generator, num_synchronized),
        synchronized_generator=synchronized.generator,
        use_stateful_dataloader=use_stateful_dataloader,
        _presharded=inputs.is_split,
        _num_processes=num_processes,
        **common,
        **{**loader_options(dataloader), **inputs.options},
    )


def _dispatches(asked_for: bool | None, by_default: bool, obstacle: str | None) -> bool:
    if asked_for and obstacle is not None:
        warn(f"dispatch_batches=True has no effect on {obstacle}: each process reads its own.")
    return obstacle is None and (by_default if asked_for is None else asked_for)


def _seeds_of_generators(as_in_1: bool, is_dispatched: bool) -> Callable[[], int] | None:
    """Return what draws the seed of a sampler's generator.

    accelerate 1.x gives samplers generators of their own, unless the main process alone draws the order.
    """
    if not as_in_1:
        return torch.random.initial_seed
    return None if is_dispatched else draw_seed


def _warn_of_overridden_iter(loader: DataLoader[Any], use_stateful_dataloader: bool) -> None:
    is_torchdatas = type(loader).__module__.startswith("torchdata.") and use_stateful_dataloader
    if type(loader).__iter__ is not DataLoader.__iter__ and not is_torchdatas:
        warn(
            f"{type(loader).__name__} overrides DataLoader.__iter__; the prepared loader is built from its "
            "dataset, sampler and options, and does not call that method.",
        )


def _obstacle_to_dispatching(split_by_rank: bool, ranks_share_samples: bool) -> str | None:
    """Return why the main process cannot read for all, as part of a message; None if it can."""
    if split_by_rank:
        return "data that is already split by rank"
    return "a mesh whose ranks share samples" if ranks_share_samples else None


@dataclass(frozen=True, kw_only=True)
class _SynchronizedOrder:
    """The samplers of a loader, with the same order on every process."""

    batch_sampler: Any = None
    sampler: Any = None
    """The sampler of loaders without batches."""
    generator: torch.Generator | None = None
    """The user's own generator, whose state is broadcast from rank 0."""
    data_takes_lists: bool = False
    """The sampler is a batch sampler: the data set takes a list of indices and returns a batch."""

    def as_options(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """Return the sampling options of the plain loader."""
        if isinstance(loader.dataset, IterableDataset):
            return {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        if self.batch_sampler is not None:
            return self.batched_by(self.batch_sampler)
        return {"sampler": self.sampler, "batch_size": None}

    def batched_by(self, batches: Any) -> dict[str, Any]:
        """Return the options of the plain loader for this batch sampler."""
        return {"sampler": batches, "batch_size": None} if self.data_takes_lists else {"batch_sampler": batches}


def _synchronized_order(
    loader: DataLoader[Any], num_processes: int, *, draw_seed_of_generator: Callable[[], int] | None, **choice: Any
) -> _SynchronizedOrder:
    """Return samplers with the same order on every process; those without a generator get one with a seed."""
    if isinstance(loader.dataset, IterableDataset):
        return _SynchronizedOrder()
    data_takes_lists = loader.batch_sampler is None and isinstance(loader.sampler, BatchSampler)
    batch_sampler: Any = loader.sampler if data_takes_lists else loader.batch_sampler
    own: Any = loader.sampler if batch_sampler is None else getattr(batch_sampler, "sampler", None)
    synchronized: Any = synchronized_sampler(own, **choice)
    if synchronized is not own and batch_sampler is not None:
        batch_sampler = with_sampler(batch_sampler, synchronized)
    generator: Any = getattr(synchronized, "generator", None) if synchronized is own else None
    if (
        own is not None
        and synchronized is own
        and num_processes > 1
        and draw_seed_of_generator is not None
        and getattr(synchronized, "generator", synchronized) is None
    ):
        generator = torch.Generator()  # else a weighted sampler draws differently on each process
        generator.manual_seed(draw_seed_of_generator())
        synchronized.generator = generator
    return _SynchronizedOrder(
        batch_sampler=batch_sampler,
        sampler=synchronized,
        generator=generator if isinstance(generator, torch.Generator) else None,
        data_takes_lists=data_takes_lists,
    )


@dataclass(frozen=True)
class _ShardInputs:
    """The data set and options of one process's loader."""

    dataset: Any
    options: dict[str, Any]
    """The options that differ from those of the plain loader."""
    is_split: bool = False
    """The data set holds only the samples of this rank."""


class _Sharding:
    """Compute one process's shard of a loader."""

    def __init__(self, num_processes: int, process_index: int, split_batches: bool, even_batches: bool) -> None:
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches

    def of_split_data(self, loader: DataLoader[Any], order: _SynchronizedOrder, dataset: Any = None) -> _ShardInputs:
        """Use data that is split by rank as it is: the loader's data set, or a shard of it."""
        dataset = loader.dataset if dataset is None else dataset
        if isinstance(loader.dataset, IterableDataset):
            dataset = stream_of(loader, dataset)
        return _ShardInputs(dataset, order.as_options(loader), is_split=True)

    def of_loader(self, loader: DataLoader[Any], order: _SynchronizedOrder) -> _ShardInputs:
        """Shard the loader's data."""
        dataset: Any = loader.dataset
        if not isinstance(dataset, IterableDataset):
            return _ShardInputs(dataset, self.of_samples(order, loader))
        if self.can_shard_files(dataset):  # every rank reads only its own files
            own = dataset.shard(num_shards=self.num_processes, index=self.process_index)  # type: ignore[attr-defined]
            return self.of_split_data(loader, order, own)
        stream = self.of_stream(loader)
        return _ShardInputs(stream, _options_of_stream(loader, stream.share))

    def can_shard_files(self, dataset: Any) -> bool:
        """Return whether a Hugging Face stream has at least one file shard per process."""
        library: Any = sys.modules.get("datasets")
        is_theirs = library is not None and isinstance(dataset, library.IterableDataset)
        enough = is_theirs and hasattr(dataset, "shard") and dataset.num_shards >= self.num_processes
        return self.num_processes > 1 and not self.split_batches and enough

    def of_stream(self, loader: DataLoader[Any]) -> IterableDatasetShard:
        """Return this process's shard of an iterable data set."""
        stream = IterableDatasetShard(
            loader.dataset,
            loader.batch_size or 1,
            bool(loader.drop_last),
            self.num_processes,
            self.process_index,
            self.split_batches and loader.batch_size is not None,
        )
        stream.fills_last_round = self.num_processes > 1
        stream.marks_last_round = True
        return stream

    def of_all(self, loader: DataLoader[Any], order: _SynchronizedOrder) -> _ShardInputs:
        """Return the inputs of a process that reads the shards of all processes."""
        if self.num_processes > 1 and self.split_batches and loader.batch_size is None and order.batch_sampler is None:
            raise ValueError(
                "split_batches=True divides batches into equal parts, and this data loader has no batch size "
                "(batch_size=None): give it one, or leave split_batches out."
            )
        if not isinstance(loader.dataset, IterableDataset):
            if self.num_processes == 1 or order.batch_sampler is not None:
                return _ShardInputs(loader.dataset, order.as_options(loader))
            one_by_one = {"batch_sampler": _one_by_one(order), "collate_fn": _Unbatched(loader.collate_fn)}
            return _ShardInputs(loader.dataset, one_by_one)
        if self.num_processes == 1:
            return _ShardInputs(stream_of(loader), order.as_options(loader))
        stream = self.of_stream(loader)
        stream.reads_for_all = True
        options = _options_of_stream(loader, stream.share)
        if loader.num_workers > 1:  # each has a part of the stream, whose end is not that of a round
            stream = IterableDatasetShard(loader.dataset, stream.share, bool(loader.drop_last))
            stream.marks_last_round = True
        return _ShardInputs(stream, options)

    def of_samples(self, order: _SynchronizedOrder, loader: DataLoader[Any]) -> dict[str, Any]:
        """Return the sampler options of this process's shard of a map-style loader."""
        if self.num_processes == 1:
            return order.as_options(loader)
        if order.batch_sampler is not None:
            return order.batched_by(self._shard(order.batch_sampler))
        single = BatchSamplerShard(_one_by_one(order), self.num_processes, self.process_index, False, self.even_batches)
        return {"batch_sampler": single, "collate_fn": _Unbatched(loader.collate_fn)}

    def _shard(self, batches: Any) -> BatchSamplerShard:
        return BatchSamplerShard(batches, self.num_processes, self.process_index, self.split_batches, self.even_batches)


def stream_of(loader: DataLoader[Any], dataset: Any = None) -> IterableDatasetShard:
    """Wrap a loader's iterable data set, or a part of it, so that it can start at any sample."""
    stream = IterableDatasetShard(loader.dataset if dataset is None else dataset, loader.batch_size or 1)
    stream.fills_last_round = False
    return stream


def _options_of_stream(loader: DataLoader[Any], share: int) -> dict[str, Any]:
    return {
        "collate_fn": MarkingCollate(loader.collate_fn),
        "batch_size": share if loader.batch_size is not None else None,
        "drop_last": False,  # the shard drops incomplete rounds by itself
    }


def _one_by_one(order: _SynchronizedOrder) -> BatchSampler:
    return BatchSampler(order.sampler, 1, False)


class _Unbatched:
    """Convert the only sample of a batch, for loaders with `batch_size=None`."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self.convert = convert

    def __call__(self, samples: list[Any]) -> Any:
        """Return the sample as the plain loader would."""
        return self.convert(samples[0])


def _is_split_by_rank(loader: DataLoader[Any], process_index: int) -> bool:
    """Return whether data is already split by rank, and warn that it is used as it is."""
    found = declared_split(loader, process_index)
    if found is None:
        return False
    warn(
        f"This data loader has {found}: it is used as it is, and not divided again. Ranks that come to their end "
        "earlier repeat their last batch, which metrics leave out.",
    )
    return True


def _synchronizable(
    rng_types: Sequence[RNGType | str] | None, generator: torch.Generator | None, num_processes: int
) -> list[RNGType | str] | None:
    """Drop generators that do not exist; None if nothing is left to synchronise."""
    if num_processes == 1 or rng_types is None:
        return None
    kept = [kind for kind in rng_types if generator is not None or str(kind) != RNGType.GENERATOR]
    return kept or None


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> PreparedLoader:
    """Return a loader like this one that skips the first batches of this process.

    A position that was loaded into the loader moves to the new one, and continues after these batches.
    """
    options = loader_options(dataloader)
    dataset: Any = dataloader.dataset
    if isinstance(dataset, IterableDataset):
        options |= {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
    elif dataloader.batch_sampler is not None:
        options["batch_sampler"] = dataloader.batch_sampler
    else:
        options |= {"sampler": dataloader.sampler, "batch_size": None}
    if not isinstance(dataloader, PreparedLoader):
        dataset = stream_of(dataloader) if isinstance(dataset, IterableDataset) else dataset
        return SkipDataLoader(dataset, skip_batches=num_batches, **options)
    options |= {
        "device": dataloader.device,
        "iteration": dataloader.iteration + dataloader._is_in_epoch,
        "_drop_last": dataloader._drop_last,
        "_non_blocking": dataloader._non_blocking,
        "skip_batches": dataloader.skip_batches + num_batches * dataloader.batches_per_round,
        "use_stateful_dataloader": dataloader.is_stateful,
    }
    skipped: PreparedLoader
    if isinstance(dataloader, DataLoaderDispatcher):
        skipped = DataLoaderDispatcher(
            dataset, split_batches=dataloader.split_batches, slice_fn=dataloader.slice_fn, **options
        )
        skipped.draws_as_reader = dataloader.draws_as_reader
    else:
        assert isinstance(dataloader, DataLoaderShard)
        skipped = DataLoaderShard(
            dataset,
            rng_types=dataloader.rng_types,
            synchronized_generator=dataloader.synchronized_generator,
            _presharded=dataloader._presharded,
            _num_processes=dataloader.num_processes,
            **options,
        )
    skipped.division = dataloader.division
    if dataloader.elastic is not None:
        skipped.make_elastic(dataloader.elastic.members, dataloader.elastic.rank)
        assert skipped.elastic is not None
        skipped.elastic.before_window = dataloader.elastic.before_window
        skipped.elastic.agree_on_seed = dataloader.elastic.agree_on_seed
    _transfer_position(dataloader, skipped, num_batches)
    return skipped


def _transfer_position(dataloader: PreparedLoader, skipped: PreparedLoader, num_batches: int) -> None:
    """Move a loaded position to the new loader, which finishes that epoch; the old one continues with the next."""
    position, dataloader._resume = dataloader._resume, None
    if position is not None:
        skipped._resume = replace(
            position,
            batches=num_batches * dataloader.batches_per_round,
            batch_size=dataloader.base_batch_size,
            dataset=None,
        )
        dataloader.set_epoch(position.epoch + 1)


class SkipDataLoader(DataLoaderShard):
    """A loader that skips its first batches. It is not divided among processes until it is prepared."""

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, skip_batches=skip_batches, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self._options = kwargs

    def undivided(self) -> DataLoader[Any]:
        """Return a plain loader that skips as many of its batches, or this one for a stream on one process."""
        if not isinstance(self.dataset, IterableDataset):
            plain: DataLoader[Any] = DataLoader(self.dataset, **self._options)
            if plain.batch_sampler is not None:
                samples: dict[str, Any] = {"batch_sampler": SkipBatchSampler(plain.batch_sampler, self.skip_batches)}
            else:
                samples = {"sampler": SkipBatchSampler(plain.sampler, self.skip_batches), "batch_size": None}
            return DataLoader(self.dataset, **loader_options(plain), **samples)
        if Runtime.current().num_processes > 1:
            raise UnsupportedSettingError(
                "prepare(skip_first_batches(loader))",
                "the stream of a loader that was not prepared cannot be divided after some of its batches.",
                "Prepare the loader, and give the prepared one to skip_first_batches().",
            )
        return self
