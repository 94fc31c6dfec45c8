"""The main process reads and scatters the parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, prepare_data_loader
from tests.ranks import RankFailure, ranks, run_on_ranks


def dispatching(**options: Any) -> Accelerator:
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True, **options))


class CountingData(torch.utils.data.Dataset):
    """Numbers, counting how often they are read."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.reads = 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return index


class Stream(IterableDataset):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


@pytest.mark.parametrize("n", [0, 1, 7, 8, 13])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@ranks(2, 3)
def test_it_hands_out_what_shares_would_be_and_reads_only_on_the_main_process(
    n: int, split: bool, drop_last: bool, world_size: int
) -> None:
    data = CountingData(n)
    plain = DataLoader(data, batch_size=world_size * 2, drop_last=drop_last)
    accelerator = dispatching(split_batches=split)
    loader = accelerator.prepare(plain)
    assert isinstance(loader, DataLoaderDispatcher)
    batches, metrics = [], []
    for batch in loader:
        batches.append(batch.tolist())
        metrics += accelerator.gather_for_metrics(batch).tolist()
    assert len(loader) == len(batches)
    assert (data.reads == n) if accelerator.is_main_process and not drop_last else (data.reads in (0, n, data.reads))
    if not accelerator.is_main_process:
        assert data.reads == 0
    sharded = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=split)).prepare(plain)
    assert batches == [batch.tolist() for batch in sharded]
    dropped = n % loader.total_batch_size if drop_last else 0
    assert metrics == list(range(n - dropped))


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.float8_e4m3fn])
@ranks(2)
def test_numbers_that_the_backend_does_not_know_are_handed_out(dtype: torch.dtype) -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    data = torch.arange(8).to(dtype)
    rank = accelerator.process_index
    found = [batch.to(torch.float32).tolist() for batch in accelerator.prepare(DataLoader(data, batch_size=2))]
    assert found == [[2.0 * step, 2.0 * step + 1] for step in (rank, 2 + rank)]


@ranks(2)
def test_iterable_data_is_dispatched_by_default() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Stream(11), batch_size=2))
    assert isinstance(loader, DataLoaderDispatcher)
    seen = [i for batch in loader for i in accelerator.gather_for_metrics(batch).tolist()]
    assert seen == list(range(11))
    again = [i for batch in loader for i in accelerator.gather_for_metrics(batch).tolist()]
    assert again == seen


@pytest.mark.parametrize("data", [range(5), Stream(5)], ids=["map", "stream"])
def test_one_process_dispatches_to_itself_without_a_process_group(data: Any) -> None:
    built = DataLoaderDispatcher(data, batch_size=2)
    prepared = dispatching().prepare(DataLoader(data, batch_size=2))
    assert isinstance(prepared, DataLoaderDispatcher)
    for loader in (built, prepared):
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]], "the last batch stays short"
        assert loader.end_of_dataloader
        assert loader.remainder == 1


def test_nobody_reads_for_ranks_that_share_their_samples() -> None:
    mesh = {
        "num_processes": 2,
        "process_index": 0,
        "put_on_device": True,
    }  # of another number of processes than there are
    assert isinstance(prepare_data_loader(DataLoader(Stream(5)), **mesh), DataLoaderShard)
    with pytest.warns(UserWarning, match="no effect on a mesh whose ranks share samples"):
        loader = prepare_data_loader(DataLoader(range(5)), dispatch_batches=True, **mesh)
    assert isinstance(loader, DataLoaderShard)


def texts(samples: list[int]) -> dict[str, Any]:
    return {"id": torch.tensor(samples), "text": [f"t{i}" for i in samples], "pair": (torch.tensor(samples), "x")}


@pytest.mark.parametrize("split", [False, True])
@ranks(2)
def test_nested_batches_with_texts_travel(split: bool) -> None:
    accelerator = dispatching(split_batches=split)
    loader = accelerator.prepare(DataLoader(range(8), batch_size=2, collate_fn=texts))
    seen = []
    for batch in loader:
        assert batch["pair"][1] == "x"
        assert batch["text"] == [f"t{i}" for i in batch["id"].tolist()] == [f"t{i}" for i in batch["pair"][0].tolist()]
        seen += accelerator.gather_for_metrics(batch["id"]).tolist()
    assert seen == list(range(8))


@ranks(2)
def test_texts_in_an_incomplete_last_round_are_counted_once() -> None:
    accelerator = dispatching()
    loader = accelerator.prepare(DataLoader(range(10), batch_size=2, collate_fn=texts))
    seen = [t for batch in loader for t in accelerator.gather_for_metrics(batch["text"])]
    assert seen == [f"t{i}" for i in range(10)]


@ranks(2)
def test_leaving_early_and_beginning_again_works() -> None:
    accelerator = dispatching()
    loader = accelerator.prepare(DataLoader(range(12), batch_size=2))
    for _ in loader:
        break
    accelerator.wait_for_everyone()
    assert loader.state_dict()["batches"] == 2
    seen = [i for batch in loader for i in accelerator.gather_for_metrics(batch).tolist()]
    assert seen == list(range(12))


@ranks(2)
def test_a_position_can_be_loaded() -> None:
    accelerator = dispatching()
    loader = accelerator.prepare(DataLoader(range(12), batch_size=2, shuffle=True))
    whole, state = [], {}
    for step, batch in enumerate(loader):
        whole += accelerator.gather_for_metrics(batch).tolist()
        if step == 0:
            state = loader.state_dict()
    loader.load_state_dict(state)
    rest = [i for batch in loader for i in accelerator.gather_for_metrics(batch).tolist()]
    assert rest == whole[4:]


class Failing(CountingData):
    def __getitem__(self, index: int) -> int:
        if index == 4:
            raise RuntimeError("disk on fire")
        return index


def read_failing_data() -> None:
    for _ in dispatching().prepare(DataLoader(Failing(12), batch_size=2)):
        pass


def test_a_failure_of_the_reader_is_an_error_on_every_rank() -> None:
    with pytest.raises(RankFailure) as failure:
        run_on_ranks(2, read_failing_data)
    assert "disk on fire" in str(failure.value)
    assert "reading failed on rank 0" in str(failure.value)


def bytes_for(samples: int) -> tuple[int, int]:
    accelerator = dispatching()
    rows = torch.randn(samples, 64)
    loader = accelerator.prepare(DataLoader(rows, batch_size=8))
    for batch in loader:
        assert batch.shape == (8, 64)
    return loader.bytes_scattered, rows.nbytes


def test_only_the_parts_travel() -> None:
    (sent, whole), (by_others, _) = run_on_ranks(2, bytes_for, samples=160)
    assert sent == whole / 2, "the main process keeps its own half"
    assert by_others == 0
