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

from .contenders import current
from .interleave import Comparison

ROUNDS_PER_SAVE = 25
LAYERS, WIDTH = 64, 1024


def run(rounds: int) -> list[Comparison]:
    """Measure all ways, in turn with the bare side."""
    times = 3 + rounds // ROUNDS_PER_SAVE
    with tempfile.TemporaryDirectory() as folder:
        return _measure(Path(folder), times)


def _measure(folder: Path, times: int) -> list[Comparison]:
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    state = current().saved_state(model, torch.optim.AdamW(model.parameters()))
    checkpoint, raw = folder / "checkpoint", folder / "raw"
    state.save(checkpoint)
    contents = {str(index): path.read_bytes() for index, path in enumerate(_files(checkpoint))}

    def write_raw() -> None:
        raw.mkdir()
        for name, data in contents.items():
            with (raw / name).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

    def read_raw() -> None:
        for path in _files(checkpoint):
            path.read_bytes()

    costs: dict[str, list[tuple[float, float]]] = {"save": [], "blocked": [], "load": []}
    for _ in range(times):
        bare = _seconds(write_raw, before=lambda: shutil.rmtree(raw, ignore_errors=True))
        whole = _seconds(lambda: state.save(checkpoint), before=lambda: shutil.rmtree(checkpoint))
        costs["save"].append((bare, whole))
        if state.save_in_background is not None:
            blocked = _seconds(lambda: state.save_in_background(checkpoint), before=lambda: shutil.rmtree(checkpoint))
            state.wait()
            costs["blocked"].append((bare, blocked))
        costs["load"].append((_seconds(read_raw), _seconds(lambda: state.load(checkpoint))))
    rows = [
        Comparison("save / writing and flushing the same bytes", costs["save"], 1.15),
        Comparison("load / reading the same bytes", costs["load"], 1.5),
        Comparison("blocked by a save in the background / writing the same bytes", costs["blocked"], 0.15),
    ]
    return [row for row in rows if row.costs]


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _seconds(work: Callable[[], object], before: Callable[[], object] | None = None) -> float:
    if before is not None:
        before()
    started = perf_counter()
    work()
    return perf_counter() - started
