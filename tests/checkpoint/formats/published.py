"""A tiny run that accelerate 1.15 and this library both understand: saved by one, loaded by the other.

    RANK=0 WORLD_SIZE=2 ... python published.py save|load FOLDER REPORT

The checkpoints in `written_by_1_15/` were made by accelerate 1.15.0 with this script, on one process and on two; the
reports beside them say what is in them.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accelerate import Accelerator


class Tied(nn.Module):
    """A model whose two layers share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(tokens)))  # type: ignore[no-any-return]


class Counter:
    """A registered object."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "history": torch.arange(self.count)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"] if len(state["history"]) == state["count"] else -1


class Run:
    """Everything of it."""

    def __init__(self, seed: int) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # 1.15 makes none on a CPU
        torch.manual_seed(seed)
        self.own = Tied()
        optimizer = torch.optim.AdamW(self.own.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
        loader = DataLoader(torch.arange(40) % 5, batch_size=4, shuffle=True)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            self.own, optimizer, scheduler, loader
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        random.seed(seed + self.accelerator.process_index)
        np.random.seed(seed + self.accelerator.process_index)
        torch.manual_seed(seed + self.accelerator.process_index)

    def train(self) -> None:
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(batch).square().mean())
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.counter.count += 1
            if self.counter.count == 4:
                break
        scaler: Any = self.accelerator.scaler
        scaler.update(256.0)

    def report(self) -> dict[str, Any]:
        scaler: Any = self.accelerator.scaler
        states = list(self.optimizer.state_dict()["state"].values())
        return {
            "weights": {name: tensor.tolist() for name, tensor in self.own.state_dict().items()},
            "tied": self.own.head.weight is self.own.embedding.weight,
            "moments": [state["exp_avg_sq"].tolist() for state in states],
            "steps": [float(state["step"]) for state in states],
            "lr": self.optimizer.param_groups[0]["lr"],
            "last_epoch": self.scheduler.state_dict()["last_epoch"],
            "scale": scaler.state_dict()["scale"],
            "count": self.counter.count,
            "micro_batch": self.accelerator.step,
            "numbers": [random.random(), float(np.random.rand()), torch.rand(()).item()],
        }


def save(folder: str) -> dict[str, Any]:
    """Train a little and save; report what is in the checkpoint."""
    run = Run(seed=1)
    scaler: Any = run.accelerator.scaler
    scaler.scale(torch.zeros(()))  # a scaler knows its scale from its first use on
    run.train()
    run.accelerator.save_state(folder)
    return run.report()


def load(folder: str) -> dict[str, Any]:
    """Load into a run with other weights; report what came."""
    run = Run(seed=2)
    run.accelerator.load_state(folder)
    return run.report()


if __name__ == "__main__":
    action, folder, file = sys.argv[1:]
    report = {"save": save, "load": load}[action](folder)
    with open(file, "w", encoding="utf-8") as stream:
        json.dump(report, stream, indent=1)
        stream.write("\n")
