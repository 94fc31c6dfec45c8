"""Prepared data loaders: my share, on my device, knowing where they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.data_loader import DataLoaderShard, SkipBatchSampler, prepare_data_loader, skip_first_batches
from accelerate.errors import UnsupportedSettingError
from accelerate.utils import set_seed
from tests.ranks import ranks, run_on_ranks


def batches_of(loader: DataLoader[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def test_one_process_keeps_the_loaders_own_batches_and_options() -> None:
    own = DataLoader(range(7), batch_size=3, num_workers=0, collate_fn=torch.tensor)
    loader = prepare_data_loader(own)
    assert isinstance(loader, DataLoader)
    assert loader.batch_sampler is own.batch_sampler
    assert loader.collate_fn is own.collate_fn
    assert batches_of(loader) == [[0, 1, 2], [3, 4, 5], [6]]
    assert prepare_data_loader(loader) is loader


@pytest.mark.parametrize("workers", [0, 2])
def test_the_end_of_the_loader_is_known_with_its_last_batch(workers: int) -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(7), batch_size=3, num_workers=workers))
    state = accelerator.gradient_state
    ends = [(state.end_of_dataloader, state.remainder) for _ in loader]
    assert ends == [(False, 1), (False, 1), (True, 1)]
    assert not state.in_dataloader
    assert (loader.total_batch_size, loader.total_dataset_length) == (3, 7)


class Stream(IterableDataset):
    def __init__(self, n: int) -> None:
        self.n = n
        self.epochs: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_data_of_unknown_length_is_read_one_batch_ahead() -> None:
    accelerator = Accelerator(cpu=True)
    data = Stream(5)
    loader = accelerator.prepare(DataLoader(data, batch_size=2))
    state = accelerator.gradient_state
    assert [(batch.tolist(), state.end_of_dataloader) for batch in loader] == [
        ([0, 1], False),
        ([2, 3], False),
        ([4], True),
    ]
    assert state.remainder == -1
    list(loader)
    assert data.epochs == [0, 1], "each pass tells its epoch"


def test_a_loader_without_data_yields_nothing() -> None:
    accelerator = Accelerator(cpu=True)
    assert list(accelerator.prepare(DataLoader([], batch_size=2))) == []
    assert list(accelerator.prepare(DataLoader(Stream(0), batch_size=2))) == []


def test_breaking_out_ends_the_iteration() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(9), batch_size=2))
    for _ in loader:
        break
    assert not accelerator.gradient_state.in_dataloader
    assert loader.iteration == 1
    assert batches_of(loader)[0] == [0, 1]


def test_loaders_nest_and_the_innermost_answers() -> None:
    accelerator = Accelerator(cpu=True)
    outer = accelerator.prepare(DataLoader(range(4), batch_size=2))
    inner = accelerator.prepare(DataLoader(range(3), batch_size=1))
    state = accelerator.gradient_state
    for _ in outer:
        assert state.active_dataloader is outer
        for _ in inner:
            assert state.active_dataloader is inner
        assert state.active_dataloader is outer
    assert state.dataloader_references == [None]


def shuffled(n: int, batch_size: int, epochs: int, **options: Any) -> list[list[list[int]]]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    set_seed(11)
    loader = accelerator.prepare(DataLoader(range(n), batch_size=batch_size, shuffle=True))
    return [[accelerator.gather(batch).tolist() for batch in loader] for _ in range(epochs)]


@pytest.mark.parametrize("options", [{}, {"use_seedable_sampler": True, "data_seed": 4}])
def test_many_processes_see_the_order_that_one_would_see(options: dict[str, Any]) -> None:
    alone = shuffled(32, 8, epochs=2, **options)
    assert alone[0] != alone[1]
    for world_size in (2, 4):
        for rank in run_on_ranks(world_size, shuffled, n=32, batch_size=8 // world_size, epochs=2, **options):
            assert rank == alone
    assert run_on_ranks(2, shuffled, n=32, batch_size=8, epochs=2, split_batches=True, **options)[1] == alone


def order_with_own_generators() -> list[list[int]]:
    accelerator = Accelerator(cpu=True)
    generator = torch.Generator().manual_seed(100 + accelerator.process_index)
    loader = DataLoader(range(8), batch_size=2, shuffle=True, generator=generator)
    return [accelerator.gather(batch).tolist() for batch in accelerator.prepare(loader)]


def test_a_users_generator_takes_rank_zeros_state() -> None:
    first, second = run_on_ranks(2, order_with_own_generators)
    assert first == second
    assert sorted(sample for batch in first for sample in batch) == list(range(8))


def weighted_samples() -> list[list[int]]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index)
    sampler = WeightedRandomSampler([0.1] * 4 + [0.9] * 4, num_samples=8)
    loader = accelerator.prepare(DataLoader(range(8), batch_size=2, sampler=sampler))
    list(loader)
    return [list(sampler.generator.get_state()[:8]), [accelerator.gather(b).tolist() for b in loader]]


def test_other_random_samplers_draw_alike_on_every_rank() -> None:
    first, second = run_on_ranks(2, weighted_samples)
    assert first == second


@ranks(2)
def test_a_loader_that_is_already_sharded_is_not_sharded_again() -> None:
    accelerator = Accelerator()
    sampler = DistributedSampler(range(8), shuffle=False)
    with pytest.warns(UserWarning, match="already has a DistributedSampler"):
        loader = accelerator.prepare(DataLoader(range(8), batch_size=2, sampler=sampler))
    mine = [[0, 2], [4, 6]] if accelerator.process_index == 0 else [[1, 3], [5, 7]]
    assert batches_of(loader) == mine


@ranks(2)
def test_iterable_data_is_shared_out() -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Stream(10), batch_size=2))
    mine = [[0, 1], [4, 5], [8, 9]] if accelerator.process_index == 0 else [[2, 3], [6, 7], [0, 1]]
    assert batches_of(loader) == mine
    assert loader.total_batch_size == 4


@pytest.mark.parametrize("n", [1, 7, 8, 10, 13])
@pytest.mark.parametrize("workers", [0, 1])
@ranks(2, 3)
def test_gather_for_metrics_returns_every_sample_once(n: int, workers: int) -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(range(n), batch_size=2, num_workers=workers))
    tensors, objects, nested = [], [], []
    for batch in loader:
        tensors += accelerator.gather_for_metrics(batch).tolist()
        objects += accelerator.gather_for_metrics([str(i) for i in batch.tolist()])
        both = accelerator.gather_for_metrics({"x": batch, "y": (batch + 1,)})
        nested += zip(both["x"].tolist(), both["y"][0].tolist(), strict=True)
    assert tensors == list(range(n))
    assert objects == [str(i) for i in range(n)]
    assert nested == [(i, i + 1) for i in range(n)]


@ranks(2)
def test_a_sampler_over_part_of_the_data_counts_its_own_samples() -> None:
    accelerator = Accelerator()
    sampler = torch.utils.data.SubsetRandomSampler([0, 2, 4, 6, 8])
    loader = accelerator.prepare(DataLoader(range(100), batch_size=2, sampler=sampler))
    seen = [i for batch in loader for i in accelerator.gather_for_metrics(batch).tolist()]
    assert sorted(seen) == [0, 2, 4, 6, 8]


class CustomBatches(BatchSampler):
    """A user's own batch sampler, known only by iterating."""


@ranks(2)
def test_custom_batch_samplers_are_shared_out() -> None:
    accelerator = Accelerator()
    batch_sampler = CustomBatches(SequentialSampler(range(9)), 2, False)
    loader = accelerator.prepare(DataLoader(range(9), batch_sampler=batch_sampler))
    seen = [i for batch in loader for i in accelerator.gather_for_metrics(batch).tolist()]
    assert seen == list(range(9))


@ranks(2)
def test_skipping_and_epochs_work_on_shares() -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(range(12), batch_size=2))
    skipped = skip_first_batches(loader, 1)
    expected = [[4, 5], [8, 9]] if accelerator.process_index == 0 else [[6, 7], [10, 11]]
    assert batches_of(skipped) == expected
    assert isinstance(skipped.batch_sampler, SkipBatchSampler)
    assert skipped.batch_sampler.total_length == 3
    assert skipped.total_batch_size == 4


def test_iterable_data_and_loaders_without_batches_can_be_skipped() -> None:
    accelerator = Accelerator(cpu=True)
    stream = accelerator.prepare(DataLoader(Stream(7), batch_size=2))
    assert batches_of(skip_first_batches(stream, 2)) == [[4, 5], [6]]
    single = accelerator.prepare(DataLoader(torch.arange(4), batch_size=None))
    assert [int(item) for item in skip_first_batches(single, 3)] == [3]


def test_what_has_not_landed_is_refused() -> None:
    loader = DataLoader(range(4))
    with pytest.raises(UnsupportedSettingError, match="dispatch_batches"):
        prepare_data_loader(loader, dispatch_batches=True)
    with pytest.raises(UnsupportedSettingError, match="use_stateful_dataloader"):
        prepare_data_loader(loader, use_stateful_dataloader=True)
    for unbatched in (DataLoader(range(4), batch_size=None), DataLoader(Stream(4), batch_size=None)):
        with pytest.raises(UnsupportedSettingError, match="batch_size=None"):
            prepare_data_loader(unbatched, num_processes=2, process_index=0)


def test_a_loader_class_with_its_own_iteration_is_told_that_it_is_not_used() -> None:
    class Own(DataLoader):
        def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
            return iter(())

    with pytest.warns(UserWarning, match="Own overrides DataLoader.__iter__"):
        prepare_data_loader(Own(range(4)))


def test_random_augmentation_draws_when_the_plain_loader_would() -> None:
    """Reading ahead would draw the second batch's numbers before the first step's dropout."""

    def noise(samples: list[int]) -> torch.Tensor:
        return torch.rand(len(samples))

    def trace(loader: DataLoader[Any]) -> list[float]:
        torch.manual_seed(0)
        return [value for batch in loader for value in (*batch.tolist(), torch.rand(()).item())]

    own = DataLoader(range(6), batch_size=2, sampler=RandomSampler(range(6)), collate_fn=noise)
    assert trace(prepare_data_loader(own)) == trace(own)


def test_a_plain_shard_can_be_built_directly() -> None:
    loader = DataLoaderShard(range(4), batch_size=2)
    assert batches_of(loader) == [[0, 1], [2, 3]]
    assert isinstance(loader.get_sampler(), SequentialSampler)
