"""Prepared data loaders: shards, devices, ends of epochs, metrics."""

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
    Subset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from accelerate.data_loader import prepare_data_loader
from meshwright import Accelerator, DataLoaderConfiguration, DataLoaderShard, set_seed, skip_first_batches
from meshwright.runtime import phases
from tests.ranks import ranks, run_on_ranks
from tests.simulated_accelerator import on_a_simulated_accelerator, set_delays


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
    assert loader.state_dict()["batches"] == 1, "a run that is saved now goes on here"
    assert batches_of(loader)[0] == [0, 1], "a loop that begins again begins a new epoch"
    assert loader.iteration == 2, "the one that was left and the one that was finished"


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
    with pytest.warns(UserWarning, match="has a DistributedSampler: it is used as it is"):
        loader = accelerator.prepare(DataLoader(range(8), batch_size=2, sampler=sampler))
    mine = [[0, 2], [4, 6]] if accelerator.process_index == 0 else [[1, 3], [5, 7]]
    assert batches_of(loader) == mine


@ranks(2)
def test_iterable_data_is_shared_out() -> None:
    accelerator = Accelerator()
    accelerator.dataloader_config.dispatch_batches = False
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
    """A user's own batch sampler, which can only be iterated."""


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
    assert len(skipped) == 2
    assert skipped.total_batch_size == 4


def test_iterable_data_and_loaders_without_batches_can_be_skipped() -> None:
    accelerator = Accelerator(cpu=True)
    stream = accelerator.prepare(DataLoader(Stream(7), batch_size=2))
    assert batches_of(skip_first_batches(stream, 2)) == [[4, 5], [6]]
    single = accelerator.prepare(DataLoader(torch.arange(4), batch_size=None))
    assert [int(item) for item in skip_first_batches(single, 3)] == [3]


def test_an_overridden_iter_is_warned_about() -> None:
    class Own(DataLoader):
        def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
            return iter(())

    with pytest.warns(UserWarning, match="Own overrides DataLoader.__iter__"):
        prepare_data_loader(Own(range(4)))


def test_random_augmentation_draws_when_the_plain_loader_would() -> None:
    """Prefetching would draw the second batch's numbers before the first step's dropout."""

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


@pytest.mark.parametrize("n", [1, 5, 8, 9])
@ranks(2, 3)
def test_metrics_over_a_distributed_sampler_count_every_sample_once(n: int) -> None:
    accelerator = Accelerator()
    sampler = DistributedSampler(range(n), shuffle=False)
    with pytest.warns(UserWarning, match="not divided again"):
        loader = accelerator.prepare(DataLoader(range(n), batch_size=2, sampler=sampler))
    seen = [i for batch in loader for i in accelerator.gather_for_metrics(batch).tolist()]
    assert sorted(seen) == list(range(n))


@ranks(3)
def test_data_that_differs_between_ranks_is_used_as_it_is_and_made_even() -> None:
    accelerator = Accelerator()
    rank = accelerator.process_index
    mine = list(range(100 * rank, 100 * rank + 2 * rank + 1))  # 1, 3 and 5 samples
    with pytest.warns(UserWarning, match="another data set on every rank"):
        loader = accelerator.prepare(DataLoader(mine, batch_size=2))
    steps, seen = 0, []
    for batch in loader:
        steps += 1
        seen += accelerator.gather_for_metrics(batch).tolist()
    assert steps == 3, "as many as the longest rank has"
    assert sorted(seen) == [0, 100, 101, 102, 200, 201, 202, 203, 204]
    assert "already split" in str(loader.plan())


@ranks(2)
def test_subsets_without_a_common_sample_are_a_split() -> None:
    accelerator = Accelerator()
    half = Subset(Subset(range(100, 120), range(2, 10)), range(accelerator.process_index, 8, 2))
    with pytest.warns(UserWarning, match="another data set on every rank"):
        loader = accelerator.prepare(DataLoader(half, batch_size=2))
    seen = [i for batch in loader for i in accelerator.gather_for_metrics(batch).tolist()]
    assert sorted(seen) == list(range(102, 110))


@ranks(2)
def test_subsets_that_overlap_are_divided_with_a_warning() -> None:
    accelerator = Accelerator()
    first = accelerator.process_index  # as random_split() without a seed
    with pytest.warns(UserWarning, match="different subsets of the data, which overlap"):
        loader = accelerator.prepare(DataLoader(Subset(range(10), range(first, first + 8)), batch_size=2))
    assert batches_of(loader) == ([[0, 1], [4, 5]] if first == 0 else [[3, 4], [7, 8]])


@ranks(2)
def test_a_stream_split_by_node_is_recognised() -> None:
    accelerator = Accelerator()
    data = Stream(5 + accelerator.process_index)
    data._distributed = object()  # as a Hugging Face data set carries it
    with pytest.warns(UserWarning, match="split by node"):
        loader = accelerator.prepare(DataLoader(data, batch_size=2))
    seen = [i for batch in loader for i in accelerator.gather_for_metrics(batch).tolist()]
    assert sorted(seen) == sorted([*range(5), *range(6)])


@ranks(2)
def test_uneven_numbers_of_steps_are_warned_of_before_the_first_step() -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    loader = accelerator.prepare(DataLoader(range(5), batch_size=1))
    with pytest.warns(UserWarning, match="rank 0 takes 3 steps per epoch and rank 1 takes 2"):
        next(iter(loader))
    even = accelerator.prepare(DataLoader(range(7), batch_size=2))
    seen = [i for batch in even for i in accelerator.gather_for_metrics(batch).tolist()]
    assert seen == list(range(7)), "equal steps with a short last batch are gathered right"


@ranks(2)
def test_two_loaders_side_by_side_are_told_apart() -> None:
    accelerator = Accelerator()
    a = accelerator.prepare(DataLoader(range(10), batch_size=2))
    b = accelerator.prepare(DataLoader(range(7), batch_size=2))
    seen_a, seen_b = [], []
    for batch_a, batch_b in zip(a, b, strict=False):
        seen_a += accelerator.gather_for_metrics(batch_a, dataloader=a).tolist()
        seen_b += accelerator.gather_for_metrics(batch_b, dataloader=b).tolist()
    assert (seen_a, seen_b) == (list(range(8)), list(range(7)))
    seen_a, seen_b = [], []
    for batch_a in a:
        seen_a += accelerator.gather_for_metrics(batch_a).tolist()
        for batch_b in b:
            seen_b += accelerator.gather_for_metrics(batch_b).tolist()
        assert accelerator.gradient_state.active_dataloader is a
    assert (seen_a, seen_b) == (list(range(10)), list(range(7)) * 3)


@ranks(2)
def test_rows_per_sample_and_results_per_batch_are_kept_in_proportion() -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(range(5), batch_size=2))
    beams, means = [], []
    for batch in loader:
        beams += accelerator.gather_for_metrics(batch.repeat_interleave(3)).tolist()
        means += accelerator.gather_for_metrics(batch.float().mean()).tolist()
    assert beams == [i for i in range(5) for _ in range(3)]
    assert len(means) == 3, "the second rank had no sample in the last step"


@pytest.mark.parametrize("kind", ["map", "custom", "stream"])
def test_one_process_weighs_the_mean_of_a_short_last_batch_by_its_samples(kind: str) -> None:
    accelerator = Accelerator(cpu=True)
    data: Any = Stream(5) if kind == "stream" else range(5)
    batching = (
        {"batch_sampler": CustomBatches(SequentialSampler(data), 2, False)} if kind == "custom" else {"batch_size": 2}
    )
    for _ in range(2):  # the second epoch too
        means, samples, names, beams = [], [], [], []
        for batch in accelerator.prepare(DataLoader(data, **batching)):
            means += accelerator.gather_for_metrics(batch.float().mean().repeat(2)).tolist()
            samples += accelerator.gather_for_metrics({"x": batch})["x"].tolist()
            names += accelerator.gather_for_metrics(["first", "second"])
            beams += accelerator.gather_for_metrics(batch.repeat_interleave(3)).tolist()
        assert means == [0.5, 0.5, 2.5, 2.5, 4.0]
        assert samples == list(range(5))
        assert names == ["first", "second", "first", "second", "first"]
        assert beams == [i for i in range(5) for _ in range(3)]


@pytest.mark.parametrize("workers", [0, 2])
@ranks(2)
def test_unbatched_loaders_are_shared_out(workers: int) -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    items = torch.arange(10).reshape(5, 2)
    loader = accelerator.prepare(DataLoader(items, batch_size=None, num_workers=workers))
    seen = torch.cat([accelerator.gather_for_metrics(item[None]) for item in loader])
    assert seen.tolist() == items.tolist()
    lists = accelerator.prepare(
        DataLoader(items, sampler=BatchSampler(SequentialSampler(items), 2, False), batch_size=None)
    )
    seen = torch.cat([accelerator.gather_for_metrics(rows) for rows in lists])
    assert seen.tolist() == items.tolist()
    stream = accelerator.prepare(DataLoader(Stream(5), batch_size=None))
    assert [i for item in stream for i in accelerator.gather_for_metrics(torch.tensor([item])).tolist()] == list(
        range(5)
    )


@pytest.mark.parametrize("dispatch", [False, True])
@ranks(2)
def test_metrics_over_streams_of_unknown_length_count_every_sample_once(dispatch: bool) -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    for n in (0, 1, 4, 7, 8):
        for workers in (0, 1):
            loader = accelerator.prepare(DataLoader(Stream(n), batch_size=2, num_workers=workers))
            seen = [i for batch in loader for i in accelerator.gather_for_metrics(batch).tolist()]
            assert seen == list(range(n)), (n, workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_persistent_workers_and_epochs(workers: int) -> None:
    torch.manual_seed(0)
    options = {"num_workers": workers, "persistent_workers": workers > 0}
    loader = prepare_data_loader(DataLoader(range(12), batch_size=4, shuffle=True, **options))
    epochs = [batches_of(loader) for _ in range(3)]
    assert all(sorted(i for batch in epoch for i in batch) == list(range(12)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    loader.load_state_dict({**loader.state_dict(), "epoch": 5, "batches": 2, "order": {"seed": 7}})
    assert len(batches_of(loader)) == 1
    assert len(batches_of(loader)) == 3


def test_the_plan_says_what_happens() -> None:
    loader = prepare_data_loader(DataLoader(range(10), batch_size=3), num_processes=2, process_index=0)
    plan = loader.plan()
    assert (plan.global_batch, plan.per_process_batch, plan.steps, plan.padding, plan.dropped) == (6, 3, 2, 2, 0)
    assert "global batch              6 = 2 x 3" in str(plan)
    dropping = prepare_data_loader(DataLoader(range(10), batch_size=3, drop_last=True))
    assert (dropping.plan().dropped, dropping.plan().padding) == (1, 0)
    assert "not known before the end" in str(prepare_data_loader(DataLoader(Stream(3))).plan())


@on_a_simulated_accelerator
def test_a_copy_that_waits_for_the_device_is_not_counted_as_data_on_a_simulated_accelerator() -> None:
    loader = Accelerator().prepare(DataLoader(torch.ones(6, 2), batch_size=1))
    list(loader)
    clock = phases.PhaseClock()
    phases.start(clock)
    try:
        set_delays(kernel_time=0.1)
        for batch in loader:
            batch.mul_(2)
    finally:
        phases.stop(clock)
    seconds = [sum(of_phase) for of_phase in zip(*(row for _, row in clock.rows), strict=True)]
    assert seconds[phases.WAITING] > 0.2
    assert seconds[phases.DATA] < 0.5 * seconds[phases.WAITING]
