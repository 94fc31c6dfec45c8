"""A copy of the state in host memory, beside a checkpoint of the same state on disk and beside a step.

A model of 67 MB with AdamW, so three times that in a copy. A loop that makes copies is also compared with one that does
not, between two copies.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from .interleave import Comparison, Lap, compare, timed
from .task import WIDTH, loader, loss_of, model

ROUNDS_PER_COPY = 25
LAYERS, HIDDEN, BATCH_SIZE = 16, 1024, 256
NEVER = 1 << 40
EVERY, DIRECTORY = "MESHWRIGHT_MEMORY_COPIES_EVERY", "MESHWRIGHT_MEMORY_COPIES_DIR"


def run(rounds: int) -> list[Comparison]:
    """Measure copies, and the steps between them."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder, tempfile.TemporaryDirectory() as disk:
        between = compare(
            "step between two copies in memory / without copies",
            lambda: lap(None, Path(folder)),
            lambda: lap(NEVER, Path(folder) / "between"),
            rounds=rounds,
            target=1.01,
        )
        return [between, *copies(Path(folder) / "copies", Path(disk), times=3 + rounds // ROUNDS_PER_COPY)]


class Training:
    """A prepared training; with `every`, copies are made in a folder."""

    def __init__(self, net: nn.Module, data: DataLoader[Any], every: int | None, folder: Path) -> None:
        from meshwright import Accelerator

        settings = {} if every is None else {EVERY: str(every), DIRECTORY: str(folder)}
        os.environ.update(settings)
        try:
            self.accelerator = Accelerator(cpu=True, project_dir=folder)
        finally:
            for name in settings:
                del os.environ[name]
        self.net, self.optimizer, self.loader = self.accelerator.prepare(net, AdamW(net.parameters()), data)
        self.accelerator.resume()

    def steps(self) -> Iterator[None]:
        """Train for ever; yield after every step."""
        while True:
            for inputs, labels in self.loader:
                self.accelerator.backward(loss_of(self.net(inputs), labels))
                self.optimizer.step()
                self.optimizer.zero_grad()
                yield


def lap(every: int | None, folder: Path) -> Lap:
    return timed(Training(model(), loader(), every, folder).steps())


def copies(folder: Path, disk: Path, times: int) -> list[Comparison]:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(HIDDEN, HIDDEN), nn.ReLU())]
    net = nn.Sequential(nn.Linear(WIDTH, HIDDEN), *layers)
    samples = TensorDataset(torch.randn(8 * BATCH_SIZE, WIDTH), torch.randint(0, HIDDEN, (8 * BATCH_SIZE,)))
    training = Training(net, DataLoader(samples, batch_size=BATCH_SIZE), NEVER, folder)
    made = training.accelerator.checkpointer.copies
    assert made is not None
    steps = training.steps()
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in ("loop", "both", "step", "resume")}
    for number in range(times):
        step = _seconds(lambda: next(steps))
        saved = _seconds(lambda: training.accelerator.save_state(disk / "checkpoint"))
        made._copy(training.optimizer.steps_taken + number)  # each in a slot of its own
        made.wait()
        copy = made.costs[-1]
        if number == 0:
            continue  # it allocates the buffers
        costs["loop"].append((saved, copy.seconds_in_loop))
        costs["both"].append((saved, copy.seconds_in_loop + copy.seconds_in_background))
        costs["step"].append((step, copy.seconds_in_loop))
        costs["resume"].append(_loads(training, disk))
    size = f"{made.costs[-1].num_bytes / 1e6:.0f} MB"
    return [
        Comparison(f"blocked by a copy in memory / save_state to disk, {size}", costs["loop"], 0.25),
        Comparison(f"a copy in memory with its background / save_state to disk, {size}", costs["both"], 1.0),
        Comparison(f"blocked by a copy in memory / a step, {size}", costs["step"]),
        Comparison(f'resume from memory / load_state(verify="hash") from disk, {size}', costs["resume"]),
    ]


def _loads(training: Training, disk: Path) -> tuple[float, float]:
    from meshwright.checkpoint.commit.recall import recall

    copies = training.accelerator.checkpointer.copies
    assert copies is not None
    from_disk = _seconds(lambda: training.accelerator.load_state(disk / "checkpoint", verify="hash"))
    return from_disk, _seconds(lambda: recall(copies, None, {}))


def _seconds(work: Any) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started
