"""Positions: seeking, other batch sizes, and positions that are refused."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, WeightedRandomSampler

from accelerate.data_loader import prepare_data_loader
from meshwright import Accelerator, set_seed
from meshwright.data.order.position import Position, PositionError
from tests.data.loaders.test_dispatch import CountingData
from tests.data.worlds import Data, StatefulStream, Stream, gathered, steps_of
from tests.ranks import run_on_ranks


@pytest.mark.parametrize("options", [{"shuffle": True}, {"shuffle": True, "huge": True}, {}])
def test_seeking_reads_nothing_that_was_consumed_and_takes_the_same_time_anywhere(options: dict[str, bool]) -> None:
    n = 1_000_000
    times = []
    for position in (0, 20_000, 31_000):
        data = CountingData(n)
        loader = prepare_data_loader(
            DataLoader(data, batch_size=32, shuffle=options.get("shuffle", False)),
            constant_memory_shuffle=options.get("huge", False),
        )
        loader.load_state_dict(Position(batches=position, batch_size=32, order={"seed": 1}).to_dict())
        started = time.perf_counter()
        next(iter(loader))
        times.append(time.perf_counter() - started)
        assert data.reads == 32
    assert max(times) < 5 * min(times) + 0.5


def test_the_middle_of_an_epoch_is_followed_by_whole_epochs() -> None:
    loader = prepare_data_loader(DataLoader(range(6), batch_size=2))
    loader.load_state_dict(Position(epoch=3, batches=2, batch_size=2).to_dict())
    assert [[b.tolist() for b in loader] for _ in range(2)] == [[[4, 5]], [[0, 1], [2, 3], [4, 5]]]
    assert loader.iteration == 5, "the epoch that comes next"


def test_a_position_saved_in_the_last_step_is_the_next_epoch() -> None:
    loader = prepare_data_loader(DataLoader(range(4), batch_size=2))
    states = [loader.state_dict() for _ in loader]
    assert [(s["epoch"], s["batches"]) for s in states] == [(0, 1), (1, 0)]
    assert (loader.state_dict()["epoch"], loader.state_dict()["batches"]) == (1, 0)
    resumed = prepare_data_loader(DataLoader(range(4), batch_size=2))
    resumed.load_state_dict(states[-1])
    assert resumed.iteration == 1  # known before it is iterated


def test_loading_does_not_disturb_torchs_generator() -> None:
    """A checkpoint restores the generator; resuming the data must not draw from it."""
    loader = prepare_data_loader(DataLoader(range(40), batch_size=4, shuffle=True))
    torch.manual_seed(0)
    numbers, state, rng = [], {}, None
    for step, _ in enumerate(loader):
        numbers.append(torch.rand(()).item())
        if step == 3:
            state, rng = loader.state_dict(), torch.get_rng_state()
    resumed = prepare_data_loader(DataLoader(range(40), batch_size=4, shuffle=True))
    resumed.load_state_dict(state)
    torch.set_rng_state(rng)
    assert [torch.rand(()).item() for _ in resumed] == numbers[4:]


def test_another_batch_size_is_taken_where_it_fits_and_refused_with_sizes_that_do() -> None:
    state = Position(batches=3, batch_size=4).to_dict()
    loader = prepare_data_loader(DataLoader(range(24), batch_size=6))
    loader.load_state_dict(state)
    assert next(iter(loader)).tolist() == [12, 13, 14, 15, 16, 17]
    with pytest.raises(PositionError, match=r"batches of 5 cannot begin there. Sizes that work: 1, 2, 3, 4, 6, 12"):
        prepare_data_loader(DataLoader(range(24), batch_size=5)).load_state_dict(state)
    with pytest.raises(PositionError, match="unexpected"):
        loader.load_state_dict({"something": "else"})


class Backwards(Sampler[int]):
    """A custom sampler with a state of its own."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.start = 0

    def __iter__(self) -> Any:
        return iter(range(self.n - 1 - self.start, -1, -1))

    def __len__(self) -> int:
        return self.n


def resumed_after(loader: Any, again: Any, steps: int) -> tuple[list[list[int]], list[list[int]]]:
    torch.manual_seed(1)
    whole, state = [], {}
    for step, batch in enumerate(loader):
        whole.append(batch.tolist())
        if step == steps - 1:
            state = loader.state_dict()
    again.load_state_dict(state)
    torch.manual_seed(2)
    return whole[steps:], [batch.tolist() for batch in again]


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: Backwards(20),
        lambda: RandomSampler(range(20), generator=torch.Generator().manual_seed(5)),
        lambda: RandomSampler(range(20), replacement=True, num_samples=14),
        lambda: WeightedRandomSampler([1.0] * 20, num_samples=20),
        lambda: torch.utils.data.SubsetRandomSampler(range(20)),
    ],
)
def test_any_sampler_goes_on_in_the_order_it_began_with(sampler: Any) -> None:
    loaders = [prepare_data_loader(DataLoader(range(20), batch_size=3, sampler=sampler())) for _ in range(2)]
    rest, resumed = resumed_after(*loaders, steps=2)
    assert resumed == rest


def test_iterable_data_with_a_state_is_asked_and_reads_nothing_again() -> None:
    loaders = [prepare_data_loader(DataLoader(StatefulStream(20), batch_size=3)) for _ in range(2)]
    rest, resumed = resumed_after(*loaders, steps=2)
    assert resumed == rest
    assert loaders[0].state_dict()["epoch"] == 1


def test_other_iterable_data_is_read_on_and_the_warning_names_the_remedy() -> None:
    loaders = [prepare_data_loader(DataLoader(Stream(20), batch_size=3)) for _ in range(2)]
    with pytest.warns(UserWarning, match=r"batch 2 of epoch 0.*give it state_dict\(\) and load_state_dict\(\)"):
        rest, resumed = resumed_after(*loaders, steps=2)
    assert resumed == rest


def test_iterable_data_with_workers_is_read_on_batch_by_batch() -> None:
    plain = DataLoader(Stream(20), batch_size=3, num_workers=2)
    loaders = [prepare_data_loader(plain) for _ in range(2)]
    with pytest.warns(UserWarning, match="read from its beginning"):
        rest, resumed = resumed_after(*loaders, steps=2)
    assert resumed == rest
    loaders[0].load_state_dict({**Position(batches=2, batch_size=3).to_dict(), "num_processes": 4})
    with (
        pytest.raises(PositionError, match="Resume on 4, or use at most one worker"),
        pytest.warns(match="read from its beginning"),
    ):
        next(iter(loaders[0]))


def run_of_four_two_three_four(n: int) -> list[int]:
    data = Data(n=n, batch_size=2, shuffle=True)
    seen: list[int] = []
    state = None
    for index, (size, limit) in enumerate([(4, 3), (2, 2), (3, 2), (4, None)]):
        world = data.world(size)
        if state is not None:
            for loader in world:
                loader.load_state_dict(state)
        steps = steps_of(world, limit, seed=index)
        seen += [sample for step in steps for sample in step.real]
        state = steps[-1].states[0]
    return seen


def test_four_two_three_and_four_processes_see_what_one_would_see() -> None:
    alone = [sample for step in steps_of(Data(n=101, batch_size=2, shuffle=True).world(1)) for sample in step.real]
    assert run_of_four_two_three_four(101) == alone
    assert sorted(alone) == list(range(101))


def real_run(state: dict[str, Any] | None, limit: int) -> tuple[list[int], dict[str, Any]]:
    accelerator = Accelerator(cpu=True)
    set_seed(3 if state is None else 100 + accelerator.num_processes)
    loader = accelerator.prepare(DataLoader(range(50), batch_size=2, shuffle=True))
    if state is not None:
        loader.load_state_dict(state)
    seen = gathered(accelerator, loader, limit)
    return seen, loader.state_dict()


def test_real_processes_carry_a_position_to_another_number_of_processes() -> None:
    seen: list[int] = []
    state = None
    for world_size, limit in ((4, 2), (2, 3), (3, 2), (4, 99)):
        per_rank = run_on_ranks(world_size, real_run, state=state, limit=limit)
        assert all(str(rank) == str(per_rank[0]) for rank in per_rank)
        seen += per_rank[0][0]
        state = per_rank[0][1]
    alone, _ = real_run(None, 99)
    assert seen == alone
