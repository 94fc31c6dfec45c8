"""Regression tests."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from accelerate.data_loader import prepare_data_loader
from meshwright import Accelerator, DataLoaderConfiguration, set_seed, skip_first_batches
from meshwright.errors import UnsupportedSettingError
from tests.data.worlds import StatefulStream, Stream
from tests.ranks import RankFailure, ranks, run_on_ranks


def batches_of(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def test_a_skipped_loader_ends_with_its_last_batch() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(10), batch_size=1))
    skipped = accelerator.skip_first_batches(loader, 3)
    assert [accelerator.gradient_state.end_of_dataloader for _ in skipped] == [False] * 6 + [True]
    assert batches_of(skip_first_batches(skip_first_batches(loader, 2), 3))[0] == [5], "skips add up"


class EpochNoting(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return index

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_an_epoch_that_is_chosen_is_the_one_that_comes() -> None:
    data = EpochNoting()
    loader = prepare_data_loader(DataLoader(data))
    for epoch in range(3):
        loader.set_epoch(epoch)
        list(loader)
    assert list(dict.fromkeys(data.epochs)) == [0, 1, 2]
    assert loader.iteration == 3


def fail_in_the_loop(rank: int) -> None:
    accelerator = Accelerator(cpu=True)
    for _ in accelerator.prepare(DataLoader(Stream(20), batch_size=2)):
        if accelerator.process_index == rank:
            raise ValueError("boom")
        accelerator.wait_for_everyone()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_a_dispatched_loop_is_seen_and_not_a_hang(rank: int) -> None:
    with pytest.raises(RankFailure, match="ValueError: boom"):
        run_on_ranks(2, fail_in_the_loop, rank=rank)


class Bare:
    """A batch sampler that is only an iterable."""

    batch_size = 2
    drop_last = False

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3], [4]])


class Sized(Bare):
    def __len__(self) -> int:
        return 3


class WithSampler(Bare):
    sampler = SequentialSampler(range(5))


@pytest.mark.parametrize("kind", [Bare, Sized, WithSampler])
@ranks(2)
def test_any_iterable_of_batches_is_shared_out_and_counted(kind: type) -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(range(5), batch_sampler=kind()))
    assert [i for b in loader for i in accelerator.gather_for_metrics(b).tolist()] == list(range(5))


@ranks(2)
def test_batches_larger_than_their_batch_size_are_not_cut() -> None:
    class Large(Sized):
        batch_size = 4

        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0, 1], [2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14]])

        def __len__(self) -> int:
            return 4

    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(range(15), batch_sampler=Large()))
    mine = [[0, 1], [6, 7, 8, 9, 10]] if accelerator.process_index == 0 else [[2, 3, 4, 5], [11, 12, 13, 14]]
    assert batches_of(loader) == mine


@pytest.mark.parametrize("even", [True, False])
@ranks(2)
def test_means_are_gathered_in_the_last_round(even: bool) -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=even))
    for n, size in ((3, 1), (5, 4)) if even else ((5, 4),):
        loader = accelerator.prepare(DataLoader(range(n), batch_size=size))
        for batch in loader:
            mean = batch.float().mean()
            scalars = accelerator.gather_for_metrics(mean)
            vectors = accelerator.gather_for_metrics(mean[None])
        assert len(scalars) <= 2
        assert len(vectors) <= 2


class TwoWorkers(IterableDataset):
    """Worker 0 has 3 samples, worker 1 has 12."""

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        return iter(range(3) if info is None or info.id == 0 else range(3, 15))


@pytest.mark.parametrize("dispatch", [True, False])
@ranks(2)
def test_short_batches_of_workers_do_not_disturb_metrics(dispatch: bool) -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    loader = accelerator.prepare(DataLoader(TwoWorkers(), batch_size=4, num_workers=2))
    seen = [i for batch in loader for i in accelerator.gather_for_metrics(batch).tolist()]
    assert sorted(seen) == list(range(15))


class Unwilling(Stream):
    def __len__(self) -> int:
        raise NotImplementedError("nobody knows")


def test_data_that_refuses_to_tell_its_length_can_be_used() -> None:
    loader = prepare_data_loader(DataLoader(Unwilling(5), batch_size=2))
    assert batches_of(loader) == [[0, 1], [2, 3], [4]]
    assert loader.plan().samples is None


def epochs_of(loader: Any, count: int, state_at: tuple[int, int] | None = None) -> tuple[list[Any], Any]:
    epochs, state = [], None
    for epoch in range(count):
        seen = []
        for step, batch in enumerate(loader):
            seen.append(batch.tolist())
            if state_at == (epoch, step):
                state = loader.state_dict()
        epochs.append(seen)
    return epochs, state


@pytest.mark.parametrize("at", [(0, 0), (0, 3), (1, 1)])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_generator_of_the_loader_resumes_in_this_and_the_next_epochs(at: tuple[int, int], workers: int) -> None:
    def make() -> Any:
        generator = torch.Generator().manual_seed(0)
        plain = DataLoader(range(8), batch_size=2, shuffle=True, generator=generator, num_workers=workers)
        return prepare_data_loader(plain)

    whole, state = epochs_of(make(), 3, at)
    resumed = make()
    resumed.load_state_dict(state)
    rest, _ = epochs_of(resumed, 3 - at[0] - (at[1] == 3))
    flat = [batch for epoch in whole for batch in epoch]
    assert [batch for epoch in rest for batch in epoch] == flat[at[0] * 4 + at[1] + 1 :]


def test_a_loop_left_early_draws_what_the_plain_loader_would() -> None:
    def orders(prepare: bool) -> list[Any]:
        loader: Any = DataLoader(range(8), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(0))
        loader = prepare_data_loader(loader) if prepare else loader
        for _ in loader:
            break
        return [batches_of(loader), batches_of(loader)]

    assert orders(prepare=True) == orders(prepare=False)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.filterwarnings("ignore:.*read from its beginning")
def test_a_stream_read_by_one_worker_resumes_once(persistent: bool) -> None:
    plain = DataLoader(Stream(8), batch_size=2, num_workers=1, persistent_workers=persistent)
    loader = prepare_data_loader(plain)
    states = [loader.state_dict() for _ in loader]
    loader.load_state_dict(states[1])
    assert [batches_of(loader), batches_of(loader)] == [[[4, 5], [6, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]]]


def test_streams_can_be_skipped_without_being_prepared() -> None:
    assert batches_of(skip_first_batches(DataLoader(Stream(8), batch_size=2), 2)) == [[4, 5], [6, 7]]


@pytest.mark.parametrize("options", [{"batch_size": 4}, {"batch_size": 4, "shuffle": True}, {"batch_size": None}])
@ranks(1, 2)
def test_a_plain_loader_that_skips_is_divided_when_it_is_prepared(options: dict[str, Any]) -> None:
    accelerator = Accelerator()
    set_seed(3)
    whole = [torch.as_tensor(batch).reshape(-1) for batch in DataLoader(range(32), **options)]
    set_seed(3)
    loader = accelerator.prepare(skip_first_batches(DataLoader(range(32), **options), 2))
    skipped = 2 * (options["batch_size"] or 1)
    for _ in range(1 if "shuffle" in options else 2):
        gathered = [accelerator.gather_for_metrics(torch.as_tensor(batch).reshape(-1)) for batch in loader]
        assert torch.equal(torch.cat(gathered), torch.cat(whole)[skipped:])
    assert accelerator.prepare(loader) is loader


@ranks(2)
def test_a_stream_that_skips_is_not_divided_without_being_prepared() -> None:
    with pytest.raises(UnsupportedSettingError, match="Prepare the loader, and give the prepared one"):
        Accelerator().prepare(skip_first_batches(DataLoader(Stream(8), batch_size=2), 2))


class Shuffled(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(8).tolist()


@pytest.mark.filterwarnings("ignore:.*read from its beginning")
def test_a_stream_drawn_from_torchs_generator_resumes_and_leaves_it_alone() -> None:
    torch.manual_seed(0)
    loader = prepare_data_loader(DataLoader(Shuffled(), batch_size=2))
    seen, numbers, state, rng = [], [], {}, None
    for step, batch in enumerate(loader):
        seen.append(batch.tolist())
        numbers.append(torch.rand(()).item())
        if step == 1:
            state, rng = loader.state_dict(), torch.get_rng_state()
    resumed = prepare_data_loader(DataLoader(Shuffled(), batch_size=2))
    resumed.load_state_dict(state)
    torch.set_rng_state(rng)
    rest = [(batch.tolist(), torch.rand(()).item()) for batch in resumed]
    assert rest == list(zip(seen[2:], numbers[2:], strict=True))


def test_torchdatas_loader_resumes_a_shuffled_epoch() -> None:
    def make() -> Any:
        return prepare_data_loader(DataLoader(range(12), batch_size=2, shuffle=True), use_stateful_dataloader=True)

    torch.manual_seed(0)
    whole, state = epochs_of(make(), 1, (0, 1))
    torch.manual_seed(9)
    resumed = make()
    resumed.load_state_dict(state)
    assert batches_of(resumed) == whole[0][2:]
    loader = make()
    last = [loader.state_dict() for _ in loader][-1]
    again = make()
    again.load_state_dict(last)
    assert len(batches_of(again)) == 6, "the next epoch, not an empty one"


def dispatched_stateful_stream(state: Any, limit: int) -> tuple[list[int], Any, int]:
    accelerator = Accelerator(cpu=True)
    data = CountingStream(30)
    loader = accelerator.prepare(DataLoader(data, batch_size=2))
    if state is not None:
        loader.load_state_dict(state)
    seen: list[int] = []
    for step, batch in enumerate(loader):
        seen += accelerator.gather_for_metrics(batch).tolist()
        if step == limit - 1:
            return seen, loader.state_dict(), data.reads
    return seen, None, data.reads


class CountingStream(StatefulStream):
    reads = 0

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            self.reads += 1
            yield number


def test_a_dispatched_stream_with_a_state_is_asked() -> None:
    seen, state, _ = run_on_ranks(2, dispatched_stateful_stream, state=None, limit=3)[0]
    rest, _, reads = run_on_ranks(2, dispatched_stateful_stream, state=state, limit=99)[0]
    assert seen + rest == list(range(30))
    assert reads == 4 + 18, "nothing is read twice but the first round, which may pad the last"


@ranks(2)
def test_a_distributed_sampler_is_counted_right_after_a_resume() -> None:
    accelerator = Accelerator()
    plain = DataLoader(range(5), batch_size=1, sampler=DistributedSampler(range(5), shuffle=False))
    with pytest.warns(UserWarning, match="DistributedSampler"):
        loader = accelerator.prepare(plain)
    states = [loader.state_dict() for _ in loader]
    loader.load_state_dict(states[0])
    assert sorted(i for b in loader for i in accelerator.gather_for_metrics(b).tolist()) == [2, 3, 4]


class LiveState(StatefulStream):
    """A stream whose state dict is its live state."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.live = {"position": 0}

    def __iter__(self) -> Iterator[int]:
        for number in range(self.live["position"], self.n):
            self.live["position"] = number + 1
            yield number
        self.live["position"] = 0

    def state_dict(self) -> dict[str, int]:
        return self.live

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.live = dict(state)


def test_a_streams_live_state_is_copied() -> None:
    loader = prepare_data_loader(DataLoader(LiveState(8), batch_size=2))
    states = [loader.state_dict() for _ in loader]
    resumed = prepare_data_loader(DataLoader(LiveState(8), batch_size=2))
    resumed.load_state_dict(states[1])
    assert batches_of(resumed) == [[4, 5], [6, 7]]


def test_loading_a_position_and_then_skipping_goes_on_in_the_same_order() -> None:
    torch.manual_seed(0)
    loader = prepare_data_loader(DataLoader(range(8), batch_size=1, shuffle=True))
    whole, state = epochs_of(loader, 1, (0, 3))
    resumed = prepare_data_loader(DataLoader(range(8), batch_size=1, shuffle=True))
    resumed.load_state_dict(state)
    torch.manual_seed(5)
    assert batches_of(skip_first_batches(resumed, 4)) == whole[0][4:]
    assert len(batches_of(resumed)) == 8, "the next epoch is whole"
    assert resumed.iteration == 2


def seedable_order() -> list[int]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(1, device_specific=True)
    loader = accelerator.prepare(DataLoader(range(8), batch_size=2, shuffle=True))
    return [i for batch in loader for i in accelerator.gather(batch).tolist()]


def test_a_seedable_order_agrees_even_when_seeds_are_specific_to_ranks() -> None:
    first, second = run_on_ranks(2, seedable_order)
    assert first == second
    assert sorted(first) == list(range(8))


@ranks(2)
def test_joining_uneven_inputs_needs_no_warning() -> None:

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    loader = accelerator.prepare(DataLoader(torch.ones(5, 1), batch_size=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with accelerator.join_uneven_inputs([model]):
            for batch in loader:
                accelerator.backward(model(batch).sum())


def test_an_old_iterator_that_dies_late_does_not_end_a_new_iteration() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(4), batch_size=2))
    old: Any = iter(loader)
    next(old)
    ends = []
    for _ in loader:
        old = None
        ends.append(accelerator.gradient_state.end_of_dataloader)
    assert ends == [False, True]


def test_a_rank_without_data_is_an_error() -> None:
    with pytest.raises(RankFailure, match="no data of its own"):
        run_on_ranks(2, iterate_my_own_data)


def iterate_my_own_data() -> None:
    accelerator = Accelerator(cpu=True)
    own = list(range(4)) if accelerator.process_index == 0 else []
    list(accelerator.prepare(DataLoader(own, batch_size=2)))


def test_a_loader_can_be_given_another_sampler() -> None:
    loader = prepare_data_loader(DataLoader(range(6), batch_size=2))
    loader.set_sampler(torch.utils.data.SubsetRandomSampler([1]))
    assert batches_of(loader) == [[1]]
    assert isinstance(loader.batch_sampler, BatchSampler)


def test_a_position_of_batches_out_of_order_is_warned_about() -> None:
    loader = prepare_data_loader(DataLoader(range(4), batch_size=2, in_order=False))
    with pytest.warns(UserWarning, match="in_order=False"):
        loader.state_dict()
