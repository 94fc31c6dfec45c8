"""Loaders whose samples are assigned to members that come and go."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accelerate.data_loader import prepare_data_loader
from meshwright import GradientAccumulationPlugin, skip_first_batches
from meshwright.errors import UnsupportedSettingError
from meshwright.runtime.loop.gradient_state import GradientState
from tests.data.members import Members
from tests.data.worlds import Data, Stream
from tests.sizes import at_night

CASES = {
    "in order": Data(n=50, batch_size=4),
    "shuffled": Data(n=50, batch_size=4, shuffle=True),
    "shuffled by seed and epoch": Data(n=50, batch_size=4, shuffle=True, seedable=True),
    "shuffled in constant memory": Data(n=50, batch_size=4, shuffle=True, huge=True),
    "split batches": Data(n=50, batch_size=8, shuffle=True, split_batches=True),
    "without the last round": Data(n=50, batch_size=4, shuffle=True, drop_last=True),
    "a sampler of batches": Data(n=50, batch_size=4, shuffle=True, kind="sampler of batches"),
}
ALL = pytest.mark.parametrize("data", CASES.values(), ids=CASES)


@ALL
def test_without_a_loss_every_member_reads_its_share_of_the_order(data: Data) -> None:
    members = Members(data, 4)
    read = {rank: [] for rank in range(4)}
    plain = {rank: [] for rank in range(4)}
    for rank, loader in enumerate(data.world(4)):
        torch.manual_seed(0)
        plain[rank] = [(batch.tolist(), loader.partial_round is None, loader.end_of_dataloader) for batch in loader]
        torch.manual_seed(0)
        own = members.loaders[rank]
        for batch in own:
            read[rank].append((batch.tolist(), own.partial_round is None, own.end_of_dataloader))
            own.commit()
    assert read == plain


@ALL
@pytest.mark.parametrize("num_steps", [1, 3])
def test_steps_have_the_samples_of_a_run_without_losses(data: Data, num_steps: int) -> None:
    undisturbed = Members(data, 4, num_steps)
    expected = undisturbed.train()
    members = Members(data, 4, num_steps)
    at = {1: lambda all: all.lose(2), 3: lambda all: all.lose(0), 6: lambda all: all.lose(1)}
    assert members.train(at) == expected
    if num_steps == 1:  # in a longer window metrics have seen samples whose gradients were lost later
        assert sorted(members.metrics) == sorted(undisturbed.metrics) == sorted(set(members.metrics))


@pytest.mark.parametrize("n", [48, 50])
def test_a_loss_in_the_last_step_takes_the_end_of_the_epoch_back(n: int) -> None:
    members = Members(Data(n=n, batch_size=4), 4)
    members.begin()
    last = -(-n // 16)
    for _ in range(last):
        assert members.next()
        if members.is_at_end:
            break
        members.commit()
    assert members.is_at_end
    members.lose(1)
    assert not members.is_at_end
    assert members.loaders[0].state_dict()["batches"] == (last - 1) * 4, "the step was not made"
    assert members.next()
    assert members.is_at_end
    members.commit()
    assert (members.loaders[0].state_dict()["epoch"], members.loaders[0].state_dict()["batches"]) == (1, 0)
    assert not members.next()
    assert sorted(set(chain(*members.steps))) == list(range(n))


def lose_one_in_the_first_step(members: Members) -> None:
    members.begin()
    members.next()
    members.lose(1)
    while not members.closes:
        members.next()
    members.commit()


@pytest.mark.parametrize(
    "data",
    [*CASES.values(), Data(n=20, batch_size=2, shuffle=True, workers=1)],
    ids=[*CASES, "workers"],
)
def test_a_replacement_goes_on_from_the_position_of_a_member(data: Data) -> None:
    replicas = 2 if data.workers else 4
    expected = Members(replace(data, workers=0), replicas).train()
    members = Members(data, replicas)
    lose_one_in_the_first_step(members)
    members.join(1)
    while members.next():
        if members.closes:
            members.commit()
    assert members.steps == expected
    assert members.loaders[1].state_dict()["order"] == members.loaders[0].state_dict()["order"]


@pytest.mark.parametrize("workers", [0, at_night(2)])
def test_members_in_the_next_epoch_draw_the_order_of_a_run_without_losses(workers: int) -> None:
    data = Data(n=30, batch_size=3, shuffle=True, workers=workers)
    undisturbed, members = Members(replace(data, workers=0), 2), Members(data, 2)
    for seed in range(3):
        undisturbed.train(seed=seed)
        members.train({2: lambda all: all.lose(0)} if seed == 1 else None, seed=seed)
    assert members.steps == undisturbed.steps


def test_a_loss_leaves_no_trace_in_torchs_generator() -> None:
    data = Data(n=30, batch_size=3, shuffle=True)
    drawn = []
    for lost in ((), (1,)):
        members = Members(data, 3)
        members.begin(seed=5)
        members.next()
        torch.manual_seed(9)
        members.lose(*lost)
        while members.next():
            pass
        drawn.append(torch.rand(1).item())
    assert drawn[0] == drawn[1]


def test_the_own_generator_of_a_sampler_draws_the_same_epochs_after_a_loss() -> None:
    orders = []
    for lost in (False, True):
        own = DataLoader(range(12), 2, shuffle=True, generator=torch.Generator().manual_seed(4))
        loader: Any = prepare_data_loader(own, num_processes=2, process_index=0, rng_types=["generator"])
        loader.make_elastic((0, 1), 0)
        loader.elastic.trains = True
        epochs = []
        for _ in range(3):
            seen: list[int] = []
            for number, batch in enumerate(loader):
                seen += batch.tolist()
                if lost and len(loader.elastic.members) == 2 and number == 1:
                    loader.change_members((0,))
                if loader.closes_window:
                    loader.commit()
            epochs.append(seen)
            loader.change_members((0, 1))
        orders.append(epochs)
    for whole, divided in zip(*orders, strict=True):
        assert set(whole) <= set(divided)
    assert orders[0][2] != orders[0][1]


@pytest.mark.parametrize("kind", [WeightedRandomSampler, SubsetRandomSampler])
def test_samplers_that_draw_an_epoch_at_once_are_read_by_members(kind: Any) -> None:
    epochs = []
    for is_elastic in (False, True):
        sampler = kind(range(12), 12) if kind is WeightedRandomSampler else kind(range(12))
        sampler.generator = torch.Generator().manual_seed(4)
        samples = []
        for rank in range(2):
            sampler.generator.manual_seed(4)
            loader: Any = prepare_data_loader(DataLoader(range(12), 3, sampler=sampler), None, 2, rank)
            if is_elastic:
                loader.make_elastic((0, 1), rank)
            samples.append([batch.tolist() for batch in loader])
        epochs.append(samples)
    assert epochs[0] == epochs[1]


def test_without_training_a_micro_batch_counts_when_the_next_one_is_asked_for() -> None:
    members = Members(Data(n=24, batch_size=2), 3, trains=False)
    members.begin()
    members.next()
    gathered = members.gather_for_metrics()
    members.next()
    assert members.loaders[0].state_dict()["batches"] == 3
    members.lose(2)
    gathered += members.gather_for_metrics()
    while members.next():
        gathered += members.gather_for_metrics()
    assert sorted(gathered) == list(range(24)), "only the open micro-batch is read again"


def test_the_window_hook_runs_between_windows_of_a_training_loop() -> None:
    members = Members(Data(n=24, batch_size=2), 2, num_steps=2)
    calls: list[int] = []
    loader = members.loaders[0]
    loader.elastic.before_window = lambda: calls.append(loader.state_dict()["batches"])
    members.train()
    assert calls == [0, 4, 8], "before the epoch and before every later window"
    loader.elastic.trains = False
    members.begin()
    while members.next():
        pass
    assert calls == [0, 4, 8]


def test_members_change_in_the_window_hook() -> None:
    data = Data(n=24, batch_size=2, shuffle=True)
    expected = Members(data, 3).train()
    members = Members(data, 3)
    lose_one_in_the_first_step(members)
    state = members.loaders[0].state_dict()
    replacement = members.add(1, (0, 1, 2))
    for rank in (0, 2):
        members.loaders[rank].elastic.before_window = lambda rank=rank: members.loaders[rank].change_members((0, 1, 2))
    replacement.load_state_dict(state)
    members.iterators[1] = iter(replacement)
    while members.next():
        if members.closes:
            members.commit()
    assert members.steps == expected


def test_the_window_hook_before_an_epoch_sees_the_position_of_that_epoch() -> None:
    members = Members(Data(n=24, batch_size=2), 2)
    loader = members.loaders[0]
    positions: list[Any] = []
    loader.elastic.before_window = lambda: positions.append(loader.state_dict())
    for _ in loader:
        break
    next(iter(loader))
    assert [(position["epoch"], position["batches"], position["begun"]) for position in positions] == [
        (0, 0, False),
        (1, 0, False),
    ]


def test_the_seed_of_an_epoch_can_be_agreed_on() -> None:
    members = Members(Data(n=24, batch_size=2, shuffle=True), 2)
    for loader in members.loaders.values():
        loader.elastic.agree_on_seed = lambda seed: 11
    orders = []
    for seed in (1, 2):
        members.steps = []
        orders.append(members.train(seed=seed))
    assert orders[0] == orders[1]
    assert members.loaders[0].order_state.key() == {"seed": 11}


def test_skipping_batches_keeps_the_members() -> None:
    members = Members(Data(n=24, batch_size=2), 2)
    members.loaders[0].change_members((0,))
    skipped = skip_first_batches(members.loaders[0], 5)
    assert sorted(chain(*(batch.tolist() for batch in skipped))) == [20, 21, 22, 23]


def refusals() -> dict[str, tuple[DataLoader[Any], dict[str, Any], str]]:
    data = range(12)
    custom = type("Buckets", (BatchSampler,), {})(SequentialSampler(data), 2, False)
    return {
        "stream": (DataLoader(Stream(12), 2), {}, "An iterable data set"),
        "dispatch": (DataLoader(data, 2), {"dispatch_batches": True}, "dispatch_batches=True"),
        "uneven": (DataLoader(data, 2), {"even_batches": False}, "even_batches=False"),
        "batch sampler": (DataLoader(data, batch_sampler=custom), {}, "The sampler Buckets"),
        "sampler": (DataLoader(data, 2, sampler=type("Own", (SequentialSampler,), {})(data)), {}, "The sampler Own"),
        "out of order": (DataLoader(data, 2, num_workers=1, in_order=False), {}, "in_order=False"),
        "split": (
            DataLoader(data, 2, sampler=torch.utils.data.DistributedSampler(data, 2, 0)),
            {},
            "already split by rank",
        ),
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", refusals())
def test_what_cannot_be_assigned_is_refused_by_name(kind: str) -> None:
    plain, options, name = refusals()[kind]
    options = {"dispatch_batches": False} | options
    loader = prepare_data_loader(plain, num_processes=1 if kind == "dispatch" else 2, process_index=0, **options)
    with pytest.raises(UnsupportedSettingError, match=name):
        loader.make_elastic((0, 1), 0)
    assert loader.elastic is None


def test_windows_over_two_epochs_are_refused_by_name() -> None:
    loader = prepare_data_loader(DataLoader(range(12), 2), num_processes=2, process_index=0)
    loader.gradient_state = GradientState(GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False))
    with pytest.raises(UnsupportedSettingError, match="sync_with_dataloader=False"):
        loader.make_elastic((0, 1), 0)


def test_persistent_workers_read_on_after_a_loss() -> None:
    plain = DataLoader(range(40), 2, sampler=RandomSampler(range(40)), num_workers=2, persistent_workers=True)
    loader: Any = prepare_data_loader(plain, num_processes=2, process_index=0)
    loader.make_elastic((0, 1), 0)
    loader.elastic.trains = True
    seen: list[int] = []
    for number, batch in enumerate(loader):
        seen += batch.tolist()
        if number == 3:
            loader.change_members((0,))
        if loader.closes_window:
            loader.commit()
    assert len(seen) == len(set(seen)) == 40 - 3 * 2, "all but what the other member had committed"
