"""A run that is saved on one number of processes and goes on with another."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from meshwright import Accelerator, set_seed
from tests.ranks import run_on_ranks
from tests.training import loss_of, make_data, make_model

SAMPLES, GLOBAL_BATCH, EPOCHS = 144, 12, 2
STEPS = SAMPLES // GLOBAL_BATCH * EPOCHS
WORLDS = [4, 2, 3, 4]


class LogCapture(logging.Handler):
    """Collect log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def train(
    *, folder: Path, first: int, last: int, split_batches: bool = True, batch_size: int = GLOBAL_BATCH
) -> dict[str, Any]:
    """Train from one step to another, loading before and saving after; return samples and losses by step."""
    messages = LogCapture()
    logging.getLogger("meshwright").addHandler(messages)
    accelerator = Accelerator(cpu=True, split_batches=split_batches, gradient_accumulation_steps=1)
    set_seed(3)
    features, labels = make_data(SAMPLES).tensors
    data = TensorDataset(torch.arange(SAMPLES), features, labels)
    model: nn.Module = make_model(seed=4)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loader: Any = DataLoader(data, batch_size=batch_size, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    changes: list[str] = []
    if first:
        report = accelerator.resume(folder)
        assert report is not None
        changes = report.changes
    samples: dict[int, list[int]] = {}
    losses: dict[int, float] = {}
    step = first
    while step < last:
        for index, *batch in loader:
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            samples[step] = index.tolist()
            losses[step] = accelerator.reduce(loss.detach(), "mean").item()
            step += 1
            if step == last:
                break
    accelerator.save_state(folder)
    logging.getLogger("meshwright").removeHandler(messages)
    number = torch.rand(()).item()
    return {"samples": samples, "losses": losses, "changes": changes, "messages": messages.texts, "number": number}


def test_four_two_three_and_four_processes_are_one_run(tmp_path: Path) -> None:
    (whole,) = run_on_ranks(1, train, folder=tmp_path / "whole", first=0, last=STEPS)
    legs = [
        (world, run_on_ranks(world, train, folder=tmp_path / "ckpt", first=first, last=first + 6))
        for world, first in zip(WORLDS, range(0, STEPS, 6), strict=True)
    ]
    for epoch in range(EPOCHS):
        steps = range(epoch * STEPS // EPOCHS, (epoch + 1) * STEPS // EPOCHS)
        seen = [i for _, leg in legs for rank in leg for step in steps for i in rank["samples"].get(step, [])]
        assert sorted(seen) == list(range(SAMPLES)), f"epoch {epoch}"
    for _, leg in legs:
        for step, loss in leg[0]["losses"].items():
            together = [index for rank in leg for index in rank["samples"][step]]
            assert together == whole["samples"][step]
            assert loss == pytest.approx(whole["losses"][step], abs=1e-5)
    before = None
    for world, leg in legs:
        for rank in leg:
            if before is None:
                assert rank["changes"] == []
            else:
                assert f"saved on {before} processes, loaded on {world}" in rank["changes"][0]
                assert "rank 0 keeps its generators; those of the other ranks were derived" in rank["changes"][1]
        output = "\n".join(leg[0]["messages"])
        assert (f"saved on {before} processes, loaded on {world}" in output) == (before is not None)
        assert not any("saved on" in text for rank in leg[1:] for text in rank["messages"]), "one process logs it"
        distinct = len({rank["number"] for rank in leg})
        assert distinct == (1 if before is None else world), "every rank has generators of its own"
        before = world


def test_the_derived_generators_are_the_same_at_every_attempt(tmp_path: Path) -> None:
    run_on_ranks(2, train, folder=tmp_path / "two", first=0, last=3)
    first, second = (run_on_ranks(3, load_only, folder=tmp_path / "two") for _ in range(2))
    assert first == second
    assert len(set(first)) == 3


def load_only(folder: Path) -> float:
    accelerator = Accelerator(cpu=True, split_batches=True)
    model: Any = make_model(seed=4)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loader = DataLoader(make_data(SAMPLES), batch_size=GLOBAL_BATCH, shuffle=True)
    accelerator.prepare(model, optimizer, scheduler, loader)
    torch.rand(7)
    accelerator.load_state(folder)
    return torch.rand(()).item()


def test_batches_of_every_process_keep_their_size_and_each_sample_comes_once(tmp_path: Path) -> None:
    """Without split_batches another world has another global batch; the data is still shared out without a gap."""
    seen: list[int] = []
    options: dict[str, Any] = {"folder": tmp_path / "ckpt", "split_batches": False, "batch_size": 4}
    first = 0
    for world, steps in ((4, 3), (2, 3), (3, 2), (4, 3)):  # 48 + 24 + 24 + 48 samples
        leg = run_on_ranks(world, train, first=first, last=first + steps, **options)
        seen += [i for step in range(first, first + steps) for rank in leg for i in rank["samples"][step]]
        first += steps
    assert sorted(seen) == list(range(SAMPLES))
