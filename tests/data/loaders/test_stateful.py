"""Prepared loaders that are also torchdata's `StatefulDataLoader`."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate.data_loader import SkipDataLoader, prepare_data_loader
from meshwright import Accelerator, DataLoaderConfiguration, DataLoaderDispatcher, DataLoaderShard, skip_first_batches
from meshwright.data.order.position import PositionError
from tests.data.worlds import Stream, gathered
from tests.ranks import run_on_ranks

torchdata = pytest.importorskip("torchdata.stateful_dataloader")

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

CLASSES = [DataLoaderShard, DataLoaderDispatcher]


def batches_of(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("loader_class", [*CLASSES, SkipDataLoader])
def test_it_is_both_the_prepared_loader_and_torchdatas(loader_class: Any) -> None:
    loader = loader_class(range(16), batch_size=4, use_stateful_dataloader=True)
    assert isinstance(loader, loader_class)
    assert isinstance(loader, torchdata.StatefulDataLoader)
    assert type(loader).__name__ == loader_class.__name__
    assert loader.use_stateful_dataloader
    plain = loader_class(range(16), batch_size=4)
    assert not isinstance(plain, torchdata.StatefulDataLoader)
    assert not plain.use_stateful_dataloader


@pytest.mark.parametrize("loader_class", CLASSES)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("data", [range(14), Stream(14)], ids=["map", "stream"])
def test_the_state_is_torchdatas_and_counts_what_was_handed_out(loader_class: Any, workers: int, data: Any) -> None:
    def make() -> Any:
        return loader_class(data, batch_size=4, num_workers=workers, use_stateful_dataloader=True)

    loader, whole, states = make(), [], []
    for batch in loader:
        whole.append(batch.tolist())
        states.append(copy.deepcopy(loader.state_dict()))
    keys = {"_snapshot", "_steps_since_snapshot"} if workers else {"_num_yielded", "_sampler_iter_yielded"}
    assert keys < states[0].keys()
    assert [state["_iterator_finished"] for state in states] == [False] * (len(whole) - 1) + [True]
    assert loader.state_dict()["_iterator_finished"]
    if not workers:
        assert [state["_num_yielded"] for state in states] == [1, 2, 3, 4]
    for step in (0, 2):
        resumed = make()
        resumed.load_state_dict(pickle.loads(pickle.dumps(states[step])))
        assert batches_of(resumed) == whole[step + 1 :]
        assert batches_of(resumed) == whole, "the next epoch is whole"
    for finished in (states[-1], loader.state_dict(), {}):
        resumed = make()
        resumed.load_state_dict(finished)
        assert batches_of(resumed) == whole
        assert resumed.iteration == (2 if finished else 1)


def test_a_state_of_torchdatas_own_loader_can_be_loaded() -> None:
    plain = torchdata.StatefulDataLoader(range(16), batch_size=4)
    batches = iter(plain)
    next(batches)
    loader = DataLoaderShard(range(16), batch_size=4, use_stateful_dataloader=True)
    loader.load_state_dict(plain.state_dict())
    assert loader.state_dict() == plain.state_dict(), "until the next iteration begins"
    assert batches_of(loader) == batches_of(batches)


@pytest.mark.parametrize("data", [range(16), Stream(16)], ids=["map", "stream"])
@pytest.mark.parametrize("stateful", [True, False])
def test_first_batches_can_be_skipped(data: Any, stateful: bool) -> None:
    loader = SkipDataLoader(data, batch_size=4, skip_batches=2, use_stateful_dataloader=stateful)
    rest = [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert [batches_of(loader), batches_of(loader)] == [rest, rest]
    prepared = prepare_data_loader(DataLoader(data, batch_size=4), use_stateful_dataloader=stateful)
    skipped = skip_first_batches(prepared, 2)
    assert batches_of(skipped) == rest
    assert isinstance(skipped, torchdata.StatefulDataLoader) == stateful


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shuffled_epoch_goes_on_in_its_order(workers: int) -> None:
    def make() -> Any:
        plain = DataLoader(range(12), batch_size=2, shuffle=True, num_workers=workers)
        return prepare_data_loader(plain, use_stateful_dataloader=True)

    loader, whole, states = make(), [], []
    for batch in loader:
        whole.append(batch.tolist())
        states.append(copy.deepcopy(loader.state_dict()))
    torch.manual_seed(9)
    resumed = make()
    resumed.load_state_dict(states[1])
    assert batches_of(resumed) == whole[2:]


def consume(kind: str, dispatch: bool | None, state: Any, limit: int) -> tuple[str, list[int], Any]:
    config = DataLoaderConfiguration(use_stateful_dataloader=True, dispatch_batches=dispatch)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    plain = DataLoader(Stream(20), batch_size=2) if kind == "stream" else DataLoader(range(20), 2, shuffle=True)
    loader = accelerator.prepare(plain)
    assert isinstance(loader, torchdata.StatefulDataLoader)
    if state is not None:
        loader.load_state_dict(state)
    seen = gathered(accelerator, loader, limit)
    return type(loader).__name__, seen, loader.state_dict()


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("dispatch", [False, True])
def test_any_ranks_state_lets_all_go_on(kind: str, dispatch: bool) -> None:
    begun = run_on_ranks(2, consume, kind=kind, dispatch=dispatch, state=None, limit=2)
    name, seen, _ = begun[0]
    assert name == ("DataLoaderDispatcher" if dispatch else "DataLoaderShard")
    for _, _, state in begun:
        rest = run_on_ranks(2, consume, kind=kind, dispatch=dispatch, state=state, limit=99)
        assert sorted(seen + rest[0][1]) == list(range(20))
    if kind == "map":
        assert sorted(seen + consume("map", dispatch, state, 99)[1]) == list(range(20)), "on another number too"
    else:
        with pytest.raises(PositionError, match="holds for 2 processes and this run has 1"):
            consume("stream", dispatch, state, 99)


@pytest.mark.parametrize("stateful", [True, False])
def test_prepared_loaders_can_be_pickled(stateful: bool) -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=stateful))
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    *_, loader = accelerator.prepare(model, optimizer, DataLoader(range(6), batch_size=2))
    for _ in loader:
        break
    (again,) = pickle.loads(pickle.dumps(accelerator))._dataloaders
    assert isinstance(again, torchdata.StatefulDataLoader) == stateful
    assert batches_of(again) == [[0, 1], [2, 3], [4, 5]]
