"""Saving and loading a run, in terms of writing and reading the same bytes; and how long a background save blocks.

A model of 256 MB with AdamW, so three times that on disk. The bare side writes each file in one piece and flushes it,
or reads it in one piece; the page cache is warm on both sides.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch

from accelerate import Accelerator

from .interleave import Comparison, summary

ROUNDS_PER_SAVE = 25
LAYERS, WIDTH = 64, 1024


def run(rounds: int) -> list[Comparison]:
    """Measure both ways, in turn with the bare side."""
    times = 3 + rounds // ROUNDS_PER_SAVE
    with tempfile.TemporaryDirectory() as folder:
        return _measure(Path(folder), times)


def _measure(folder: Path, times: int) -> list[Comparison]:
    accelerator = Accelerator(cpu=True)
    model: torch.nn.Module = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpoint, raw = folder / "checkpoint", folder / "raw"
    accelerator.save_state(checkpoint)
    contents = {path.name: path.read_bytes() for path in checkpoint.iterdir()}

    def write_raw() -> None:
        raw.mkdir()
        for name, data in contents.items():
            with (raw / name).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

    def save() -> None:
        accelerator.save_state(checkpoint)

    def save_in_the_background() -> None:
        accelerator.save_state(checkpoint, wait=False)

    def read_raw() -> None:
        for path in checkpoint.iterdir():
            path.read_bytes()

    costs: dict[str, list[tuple[float, float]]] = {"save": [], "blocked": [], "load": []}
    for _ in range(times):
        bare = _seconds(write_raw, before=lambda: shutil.rmtree(raw, ignore_errors=True))
        whole = _seconds(save, before=lambda: shutil.rmtree(checkpoint))
        costs["save"].append((bare, whole))
        blocked = _seconds(save_in_the_background, before=lambda: shutil.rmtree(checkpoint))
        accelerator.checkpointer.wait()
        costs["blocked"].append((whole, blocked))
        costs["load"].append((_seconds(read_raw), _seconds(lambda: accelerator.load_state(checkpoint))))
    return [
        summary("save_state / writing and flushing the same bytes", costs["save"], target=1.15),
        summary("load_state / reading the same bytes", costs["load"], target=1.5),
        summary("blocked by save_state(wait=False) / save_state", costs["blocked"], target=0.15),
    ]


def _seconds(work: Callable[[], object], before: Callable[[], object] | None = None) -> float:
    if before is not None:
        before()
    started = perf_counter()
    work()
    return perf_counter() - started
