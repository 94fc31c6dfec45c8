"""The task that every contender trains, and the log from which losses are counted. Needs only torch."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

REPLICAS, SHARE = 4, 8
"""Processes, and the samples of each in a step."""
SAMPLES = 60 * REPLICAS * SHARE
SECONDS_PER_STEP = 0.1
"""Of pretended computation, for a full share of samples: two cores would be the limit otherwise."""

torch.manual_seed(0)
torch.set_num_threads(1)
_features = torch.randn(SAMPLES, 16)
data = torch.utils.data.TensorDataset(
    _features, (_features @ torch.randn(16, 4)).argmax(1), torch.arange(SAMPLES, dtype=torch.long)
)
folder = Path(os.environ.get("KILLS_FOLDER", "."))
num_steps = int(os.environ.get("KILLS_STEPS", "0"))


def make_model() -> nn.Sequential:
    """Make the same model everywhere."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch_of(step: int, replica: int) -> list[Tensor]:
    """Return what a replica computes in a step (from 0), if all are present; a new order every epoch."""
    per_epoch = SAMPLES // (REPLICAS * SHARE)
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(step // per_epoch))
    first = (step % per_epoch * REPLICAS + replica) * SHARE
    return [tensor[order[first : first + SHARE]] for tensor in data.tensors]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Compute a loss as slowly as a real model would."""
    time.sleep(SECONDS_PER_STEP * len(inputs) / SHARE)
    return nn.functional.cross_entropy(model(inputs), targets)


def wait_for_all() -> None:
    """Wait until a process of every replica has begun its log."""
    while len({file.name.split("_")[1] for file in folder.glob("log_*")}) < REPLICAS:
        time.sleep(0.05)


class Log:
    """What one process has done: a line when it begins, and one for every step that was made with its samples."""

    def __init__(self, replica: int) -> None:
        self._replica = replica
        self._file = open(folder / f"log_{replica}_{os.getpid()}", "w", buffering=1)  # noqa: SIM115
        self._write({"replica": replica, "pid": os.getpid()})

    def add(self, step: int, samples: Iterable[tuple[int, int]]) -> None:
        """Note a step, counted from 1, and the epochs and numbers of its samples that this process had."""
        self._write({"step": step, "samples": list(samples)})

    def end(self, model: nn.Module) -> None:
        """Write the parameters at the end of training."""
        vector = nn.utils.parameters_to_vector(model.parameters()).detach()
        torch.save(vector, folder / f"end_{self._replica}")

    def _write(self, line: dict[str, object]) -> None:
        self._file.write(json.dumps(line | {"time": time.time()}) + "\n")
