"""A trace of a run, for `meshwright check --resume`: the exact state at every backward pass."""

from __future__ import annotations

import json
import os
import signal
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config.environment import TRACE_FOLDER, read
from ..instruments import Instrument

LAST = "MESHWRIGHT_TRACE_LAST"
KILL_AT = "MESHWRIGHT_TRACE_KILL_AT"
FIELDS = {
    "loaders": "the position in the data",
    "generators": "torch's random state",
    "rates": "the learning rates",
    "scale": "the loss scale",
    "loss": "the loss",
}
"""The recorded fields, in the order in which a difference appears."""


class ResumeTrace(Instrument):
    """The trace of one rank. Its position is part of the checkpoint, so that a resumed run continues the count."""

    def __init__(self, folder: Path, rank: int, last: int, kill_at: int | None) -> None:
        self.folder = folder
        self.count = 0
        self._file = folder / f"rank_{rank}.jsonl"
        self._last = last
        self._kill_at = kill_at

    @classmethod
    def from_environment(cls, rank: int) -> ResumeTrace:
        """Create the trace that the environment variables of `meshwright check --resume` request."""
        kill_at = read(KILL_AT)
        return cls(Path(read(TRACE_FOLDER) or "."), rank, int(read(LAST) or 0), int(kill_at) if kill_at else None)

    def backward_ended(self, accelerator: Any, loss: Tensor) -> None:
        """Record the pass."""
        scale = None if accelerator.scaler is None else accelerator.scaler.get_scale()
        self.record(loss, accelerator._optimizers, accelerator._dataloaders, scale)

    def redirected(self, path: str) -> str:
        """Return the path for a checkpoint of a traced run, separate from those of other runs."""
        return str(self.folder / "checkpoints" / path.strip("/").replace("/", "_").replace("..", "_"))

    def record(self, loss: Tensor, optimizers: list[Any], loaders: list[Any], scale: float | None) -> None:
        """Record one backward pass; end the process at the requested step."""
        self.count += 1
        row = {
            "n": self.count,
            "loss": float(loss.detach().sum()).hex(),
            "rates": [group["lr"] for optimizer in optimizers for group in optimizer.param_groups],
            "scale": scale,
            "loaders": [[loader.iteration, loader.cursor.batches] for loader in loaders],
            "generators": zlib.crc32(torch.get_rng_state().numpy().tobytes()),
        }
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if self.count == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.count == self._last:
            os._exit(0)

    def state_dict(self) -> dict[str, int]:
        """Return the number of recorded backward passes."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue the count, and write to a file where it continues."""
        self.count = state["count"]
        (self._file.with_suffix(".resumed")).write_text(str(self.count), encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class TraceDifference:
    """The first difference between a resumed run and an uninterrupted one."""

    rank: int
    step: int
    fields: tuple[str, ...]


def read_rows(folder: Path, rank: int) -> dict[int, dict[str, Any]]:
    """Return the records of a rank by step; of a step that was repeated after a resume, the last record."""
    file = folder / f"rank_{rank}.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return {row["n"]: row for row in map(json.loads, lines)}


def first_difference(whole: Path, resumed: Path, rank: int, after: int) -> TraceDifference | None:
    """Compare the steps after the resume, and return the first that differs."""
    expected, seen = read_rows(whole, rank), read_rows(resumed, rank)
    for step in sorted(number for number in expected if number > after):
        if step not in seen:
            return TraceDifference(rank=rank, step=step, fields=("the step itself, which never came",))
        differing = tuple(text for name, text in FIELDS.items() if expected[step][name] != seen[step][name])
        if differing:
            return TraceDifference(rank=rank, step=step, fields=differing)
    return None
