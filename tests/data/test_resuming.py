"""An epoch that is continued in its middle gives every rank what the epoch without an interruption gives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from torch.utils.data.distributed import DistributedSampler

from meshwright import Accelerator, AcceleratorState, DataLoaderConfiguration, set_seed
from tests.data.worlds import Data
from tests.ranks import ranks
from tests.sizes import sized

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # streams are read on, ranks may be uneven

Steps = list[tuple[Any, list[int] | None, bool]]


class Texts(Dataset[Any]):
    """Rows that cannot be joined to a tensor."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "text": f"text {index}", "ragged": [index] * (index % 3)}


class ReusableStream(IterableDataset[int]):
    """Numbers with a state, which every iteration begins anew unless a state was loaded."""

    def __init__(self, n: int) -> None:
        self.n, self.position, self.loaded = n, 0, 0

    def __iter__(self) -> Iterator[int]:
        start, self.loaded = self.loaded, 0
        for number in range(start, self.n):
            self.position = number + 1
            yield number

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["position"]


def as_lists(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": torch.tensor([row["id"] for row in rows]), "rows": rows}


def map_style(**options: Any) -> Callable[[int, int], DataLoader[Any]]:
    return lambda n, size: Data(n=n, batch_size=size, **options).plain()


def texts(n: int, size: int) -> DataLoader[Any]:
    return DataLoader(Texts(n), batch_size=size, shuffle=True, collate_fn=as_lists)


def stream_with_a_state(n: int, size: int) -> DataLoader[Any]:
    return DataLoader(ReusableStream(n), batch_size=size)


def distributed_sampler(n: int, size: int) -> DataLoader[Any]:
    return DataLoader(range(n), batch_size=size, sampler=DistributedSampler(range(n), shuffle=True))


def own_subset(n: int, size: int) -> DataLoader[Any]:
    """Rank 0 has most of the data, so that the others end early."""
    accelerator = Accelerator(cpu=True)
    own = range(n * 2 // 3) if accelerator.is_main_process else range(n * 2 // 3, n)
    return DataLoader(Subset(range(n), list(own)), batch_size=size, shuffle=True)


PLAIN = {
    "map": map_style(),
    "shuffled": map_style(shuffle=True),
    "opaque": map_style(kind="opaque"),
    "sampler of batches": map_style(kind="sampler of batches", shuffle=True),
    "texts": texts,
    "stream": map_style(kind="stream"),
    "stream of batches": map_style(kind="stream of batches"),
    "stateful stream": stream_with_a_state,
    "distributed sampler": distributed_sampler,
    "own subset": own_subset,
}
SPLIT = ("map", "shuffled", "opaque", "texts", "stream", "stateful stream")
STATEFUL = ("shuffled", "texts", "stream", "stateful stream")
DIVIDED = ("distributed sampler", "own subset")


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def read(loader: Any, limit: int | None = None) -> Steps:
    """Return this rank's batches, how many samples of each rank are real, and whether the batch is the last."""
    steps: Steps = []
    for batch in loader:
        partial = loader.partial_round
        steps.append((plain(batch), None if partial is None else partial.counts, loader.end_of_dataloader))
        if len(steps) == limit:
            break
    return steps


def check(kind: str, n: int, world_size: int, **options: Any) -> None:
    split = options.get("split_batches", False)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))

    def prepared() -> Any:
        torch.manual_seed(5)
        return accelerator.prepare(PLAIN[kind](n, 2 * world_size if split else 2))

    whole = read(prepared())
    assert whole[-1][2]
    for stop in range(1, len(whole)):
        begun = prepared()
        assert read(begun, limit=stop) == whole[:stop], (kind, n, options, stop)
        state = copy.deepcopy(begun.state_dict())
        continued = prepared()
        continued.load_state_dict(state)
        torch.manual_seed(stop)  # what was drawn since then is restored by a checkpoint, and is no matter here
        if stop + 1 < len(whole):  # and once more, from a position of the continued epoch
            assert read(continued, limit=1) == whole[stop : stop + 1], (kind, n, options, stop)
            state = copy.deepcopy(continued.state_dict())
            continued = prepared()
            continued.load_state_dict(state)
            stop += 1
        assert read(continued) == whole[stop:], (kind, n, options, stop, "continued")
        assert read(accelerator.skip_first_batches(prepared(), stop)) == whole[stop:], (kind, n, options, stop)


@pytest.mark.parametrize("dispatch", [False, True], ids=["shards", "dispatched"])
@ranks(2, 3)
def test_the_rest_of_an_epoch_is_the_same_after_a_resume(dispatch: bool, world_size: int) -> None:
    for n in (world_size * 8, world_size * 8 + 1, world_size * 8 + 2 * world_size - 1):
        for kind in PLAIN:
            if not (dispatch and kind in DIVIDED):
                check(kind, n, world_size, dispatch_batches=dispatch)
        for kind in SPLIT:
            check(kind, n, world_size, dispatch_batches=dispatch, split_batches=True)
        check("shuffled", n, world_size, dispatch_batches=dispatch, use_seedable_sampler=True)
        check("shuffled", n, world_size, dispatch_batches=dispatch, constant_memory_shuffle=True)


@pytest.mark.parametrize("dispatch", [False, True], ids=["shards", "dispatched"])
@ranks(2)
def test_the_rest_of_an_epoch_of_torchdatas_loader_is_the_same_after_a_resume(dispatch: bool, world_size: int) -> None:
    pytest.importorskip("torchdata")
    for kind in STATEFUL:
        for split in (False, True):
            check(kind, 17, world_size, dispatch_batches=dispatch, split_batches=split, use_stateful_dataloader=True)


# --- trained parameters -----------------------------------------------------------------------------------------------

SEED, EPOCHS = 3, 2


class Training:
    """A training of a few epochs that can stop after any batch, with a checkpoint, and go on from one."""

    def __init__(self, kind: str, n: int, window: int, options: dict[str, Any]) -> None:
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=window, dataloader_config=DataLoaderConfiguration(**options)
        )
        set_seed(SEED)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        size = 2 * self.accelerator.num_processes if options.get("split_batches") else 2
        prepared = self.accelerator.prepare(model, optimizer, PLAIN[kind](n, size), scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        self.batches = torch.zeros((), dtype=torch.int64)
        self.accelerator.register_for_checkpointing(self)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]

    def run(self, folder: Path, *, stop: int | None = None, until: int | None = None) -> list[Any] | None:
        """Train two epochs, or some batches, and return what it ended with.

        With `stop` it ends after so many batches, as soon as a window is full, with a checkpoint.
        """
        epochs = 0
        while self.batches != until and epochs != EPOCHS:
            for batch in self.loader:
                numbers = batch["id"] if isinstance(batch, dict) else batch
                with self.accelerator.accumulate(self.model):
                    features = torch.stack([torch.sin(numbers.float() * k) for k in range(1, 5)], dim=-1)
                    self.accelerator.backward(self.model(features).square().mean())
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.batches += 1
                # Gradients of a window that is not full are no part of a checkpoint.
                if stop is not None and self.batches >= stop and self.accelerator.sync_gradients:
                    self.accelerator.save_state(folder)
                    return None
                if self.batches == until:
                    break
            epochs += until is None
        params = [param.detach().clone() for param in self.accelerator.unwrap_model(self.model).parameters()]
        return [*params, self.batches, torch.tensor(self.scheduler.get_last_lr())]


def check_training(kind: str, n: int, window: int, stops: Sequence[int], folder: Path, **options: Any) -> None:
    """Compare the training that goes on from checkpoints with the one that was never interrupted."""

    def new() -> Training:
        AcceleratorState._reset_state()
        return Training(kind, n, window, options)

    whole = new().run(folder)
    assert whole is not None
    for stop in stops:
        assert new().run(folder, stop=stop) is None
        resumed = new()
        resumed.accelerator.resume(folder)
        found = resumed.run(folder, until=int(whole[-2]))
        assert found is not None
        for one, other in zip(whole, found, strict=True):
            assert torch.equal(one, other), (kind, n, window, options, stop)


ENDS = sized(gate=(2,), nightly=(0, 1, 2, 3, 4, 5, 6, 7))
"""How many samples are behind the last full round of 8."""
STOPS = sized(gate=(9,), nightly=tuple(range(1, 13)))
WINDOWS = sized(gate=(2,), nightly=(1, 2, 3))


@pytest.mark.parametrize("dispatch", [False, True], ids=["shards", "dispatched"])
@pytest.mark.parametrize("kind", PLAIN)
@ranks(2, time_limit=1800.0)
def test_a_training_that_resumes_in_the_middle_of_an_epoch_ends_in_the_same_bits(
    kind: str, dispatch: bool, tmp_path: Path
) -> None:
    if dispatch and kind in DIVIDED:
        return
    for end in ENDS:
        for window in WINDOWS:
            for split in (False, True) if kind in SPLIT else (False,):
                options = {"dispatch_batches": dispatch, "split_batches": split}
                check_training(kind, 24 + end, window, STOPS, tmp_path / "ckpt", **options)
