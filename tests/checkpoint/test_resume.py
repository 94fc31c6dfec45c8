"""A resumed run and one that was never interrupted end in the same bits."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from meshwright import Accelerator, set_seed
from tests.ranks import run_on_ranks
from tests.sizes import on_two_processes
from tests.training import CLASSES, FEATURES, loss_of, make_data

WINDOW = 3
SAMPLES, BATCH = 132, 4


class Average:
    """A registered object: a moving average of the weights, and how many micro-batches there were."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {name: param.detach().clone() for name, param in model.named_parameters()}
        self.micro_batches = 0

    def update(self, model: nn.Module) -> None:
        for name, param in model.named_parameters():
            self.weights[name].lerp_(param.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "micro_batches": self.micro_batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights, self.micro_batches = state["weights"], state["micro_batches"]


class Noisy(Dataset[Any]):
    """Samples with noise from all three generators."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        features, label = self.samples[index]
        return features + torch.rand(()) + random.random() + np.float32(np.random.rand()), label


def train(
    *,
    until: int,
    precision: str,
    optimizer_name: str,
    num_workers: int,
    noise: bool = False,
    between_epochs: bool = False,
    save_at: int | None = None,
    folder: Path | None = None,
    resume: bool = False,
    seed: int = 5,
    **save_options: Any,
) -> tuple[dict[int, float], dict[str, Any]]:
    """Train for a number of micro-batches; return the loss of each, and everything that the run ended with."""
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=WINDOW)
    set_seed(seed)
    model = nn.Sequential(
        nn.Linear(FEATURES, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, CLASSES)
    )
    average = Average(model)
    set_seed(seed, device_specific=True)
    if optimizer_name == "AdamW":
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True)
    scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=200)
    data = make_data(SAMPLES)
    loader: Any = DataLoader(Noisy(data) if noise else data, batch_size=BATCH, shuffle=True, num_workers=num_workers)
    wrapped, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    accelerator.register_for_checkpointing(average)
    if resume:
        accelerator.resume(folder)
    losses: dict[int, float] = {}
    while average.micro_batches < until:
        for batch in loader:
            with accelerator.accumulate(wrapped):
                loss = loss_of(wrapped, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            average.update(model)
            average.micro_batches += 1
            losses[average.micro_batches] = loss.item()
            if average.micro_batches == save_at and not between_epochs:
                accelerator.save_state(folder, **save_options)
            if average.micro_batches == until:
                break
        if average.micro_batches == save_at and between_epochs:
            accelerator.save_state(folder, **save_options)
    accelerator.checkpointer.wait()
    return losses, {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "average": average.weights,
        "scheduler": scheduler.state_dict(),
        "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
        "numbers": [torch.rand(()).item(), random.random(), float(np.random.rand())],
    }


def assert_same_bits(one: Any, other: Any, where: str = "") -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, other), f"{where} differs by {(one.float() - other.float()).abs().max()}"
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for name in one:
            assert_same_bits(one[name], other[name], f"{where}.{name}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same_bits(left, right, f"{where}[{index}]")
    else:
        assert one == other, f"{where}: {one} and {other}"


def assert_resumes(world_size: int, folder: Path, *, save_at: int, until: int, **options: Any) -> None:
    whole = run_on_ranks(world_size, train, until=until, **options)
    went_on = save_at + 2  # what the run did after its last save must not count
    run_on_ranks(world_size, train, until=went_on, save_at=save_at, folder=folder, **options)
    resumed = run_on_ranks(world_size, train, until=until, folder=folder, resume=True, seed=99, **options)
    for rank in range(world_size):
        (losses, end), (losses_again, end_again) = whole[rank], resumed[rank]
        assert losses_again == {step: loss for step, loss in losses.items() if step > save_at}, f"rank {rank}"
        assert_same_bits(end, end_again, f"rank {rank}")


@on_two_processes
@pytest.mark.parametrize(
    ("precision", "optimizer_name", "num_workers", "noise"),
    [
        ("fp16", "AdamW", 2, False),
        ("fp16", "SGD", 0, True),
        ("bf16", "SGD", 2, False),
        ("no", "AdamW", 0, True),
    ],
)
def test_a_run_resumes_in_the_middle_of_an_epoch_with_the_same_bits(
    world_size: int, precision: str, optimizer_name: str, num_workers: int, noise: bool, tmp_path: Path
) -> None:
    assert_resumes(
        world_size,
        tmp_path / "ckpt",
        save_at=9,
        until=45,
        precision=precision,
        optimizer_name=optimizer_name,
        num_workers=num_workers,
        noise=noise,
    )


@on_two_processes
def test_a_run_saved_in_the_background_resumes_with_the_same_bits(world_size: int, tmp_path: Path) -> None:
    options = {"precision": "fp16", "optimizer_name": "AdamW", "num_workers": 0, "wait": False}
    assert_resumes(world_size, tmp_path / "ckpt", save_at=9, until=24, **options)


@on_two_processes
@pytest.mark.parametrize("between_epochs", [False, True], ids=["in the last step", "between epochs"])
def test_a_run_resumes_at_the_end_of_an_epoch_with_the_same_bits(
    world_size: int, between_epochs: bool, tmp_path: Path
) -> None:
    end = math.ceil(SAMPLES // BATCH / world_size)
    options = {"precision": "no", "optimizer_name": "AdamW", "num_workers": 0, "between_epochs": between_epochs}
    assert_resumes(world_size, tmp_path / "ckpt", save_at=end, until=end * 2 + 3, **options)


@on_two_processes
def test_a_run_resumes_in_the_first_window_of_an_epoch_with_the_same_bits(world_size: int, tmp_path: Path) -> None:
    end = math.ceil(SAMPLES // BATCH / world_size)
    options = {"precision": "no", "optimizer_name": "AdamW", "num_workers": 0, "noise": True}
    assert_resumes(world_size, tmp_path / "ckpt", save_at=end + 3, until=end * 2 + 3, **options)
