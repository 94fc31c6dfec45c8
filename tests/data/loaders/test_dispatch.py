"""The main process reads and scatters the parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate.data_loader import prepare_data_loader
from meshwright import Accelerator, DataLoaderConfiguration, DataLoaderDispatcher, DataLoaderShard
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


class WorkersStream(Stream):
    """Each worker reads its own part."""

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        return iter(range(info.id, self.n, info.num_workers))


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
    assert data.reads == (len(batches) * loader.total_batch_size if accelerator.is_main_process else 0)
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


class Pair(NamedTuple):
    number: torch.Tensor
    text: list[str]


@dataclass
class Labelled:
    number: torch.Tensor
    labels: tuple[str, ...]


COLLATED: dict[str, Callable[[list[int]], Any]] = {
    "strings": lambda rows: [f"t{row}" for row in rows],
    "tuple of strings": lambda rows: (torch.tensor(rows), tuple(f"t{row}" for row in rows)),
    "constants": lambda rows: {"rows": torch.tensor(rows), "size": 4, "name": "x", "mask": None, "empty": []},
    "nested": lambda rows: [{"a": ({"b": rows}, torch.tensor(rows))}, [[row, row] for row in rows]],
    "named tuple": lambda rows: Pair(torch.tensor(rows), [f"t{row}" for row in rows]),
    "data class": lambda rows: Labelled(torch.tensor(rows), tuple(f"t{row}" for row in rows)),
    "arrays": lambda rows: {"array": np.array(rows), "object": np.array([f"t{row}" for row in rows], dtype=object)},
    "ragged": lambda rows: [torch.full((row,), row) for row in rows],
    "padded": lambda rows: torch.nn.utils.rnn.pad_sequence([torch.full((row,), row) for row in rows]),
    "scalar": lambda rows: {"rows": torch.tensor(rows), "mean": torch.tensor(rows).float().mean()},
}


@pytest.mark.parametrize("split", [False, True])
@ranks(2, 3)
def test_a_batch_may_hold_anything(split: bool, world_size: int) -> None:
    for kind, collate in COLLATED.items():
        for data in (range(world_size * 4 + 3), Stream(world_size * 4 + 3)):
            plain: DataLoader[Any] = DataLoader(data, batch_size=2 * world_size if split else 2, collate_fn=collate)
            config = {"split_batches": split}
            sharding = Accelerator(
                cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False, **config)
            )
            handed_out = [repr(batch) for batch in dispatching(**config).prepare(plain)]
            assert handed_out == [repr(batch) for batch in sharding.prepare(plain)], kind
            assert len(handed_out) == 3


@ranks(2)
def test_a_round_is_divided_as_the_user_says(world_size: int) -> None:
    def every_second(batch: torch.Tensor, part: slice, process_index: int, num_processes: int) -> torch.Tensor:
        assert (part.start, part.stop) == (2 * process_index, 2 * process_index + 2)
        return batch[process_index::num_processes]

    for split in (False, True):
        plain: DataLoader[Any] = DataLoader(range(8), batch_size=4 if split else 2)
        accelerator = dispatching(split_batches=split)
        loader = accelerator.prepare_data_loader(plain, slice_fn_for_dispatch=every_second)
        rank = accelerator.process_index
        assert [batch.tolist() for batch in loader] == [[rank, rank + 2], [rank + 4, rank + 6]]


@ranks(2)
def test_a_batch_that_cannot_be_divided_into_equal_parts_is_refused(world_size: int) -> None:
    accelerator = dispatching(split_batches=True)
    for data in (range(10), Stream(10)):
        with pytest.raises(ValueError, match=r"the batch size \(5\) needs to be a round multiple"):
            accelerator.prepare(DataLoader(data, batch_size=5))
        with pytest.raises(ValueError, match="has no batch size"):
            accelerator.prepare(DataLoader(data, batch_size=None))


@pytest.mark.parametrize("workers", [1, 2])
@ranks(2)
def test_workers_that_end_in_the_middle_of_a_round_lose_nothing(workers: int, world_size: int) -> None:
    for split in (False, True):
        accelerator = dispatching(split_batches=split)
        plain: DataLoader[Any] = DataLoader(
            WorkersStream(21), batch_size=4 if split else 2, num_workers=workers, collate_fn=texts
        )
        loader = accelerator.prepare(plain)
        seen = [text for batch in loader for text in accelerator.gather_for_metrics(batch["text"])]
        assert sorted(seen) == sorted(f"t{number}" for number in range(21))
        rest = accelerator.skip_first_batches(loader, 2)
        assert [text for batch in rest for text in accelerator.gather_for_metrics(batch["text"])] == seen[8:]


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
