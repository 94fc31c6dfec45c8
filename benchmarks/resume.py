"""Resuming: from the start of the process to the end of the first step after a checkpoint in the middle of an epoch.

The checkpoint was made after 400 batches of 8 samples, each of which takes 0.1 ms to decode. The bare side loads what
it saved and reads past those batches, as a plain loop has to. Whoever does not train on the exact next batch fails. The
clock is the process's own, of CPU time: what other processes do cancels out.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset

from .contenders import bare, current
from .interleave import Comparison
from .task import BATCH_SIZE, CLASSES, WIDTH, model

ROUNDS_PER_RESUME = 25
BATCHES = 400
SECONDS_TO_DECODE = 1e-4


class Decoded(Dataset[tuple[Tensor, int]]):
    """Samples that say their number and take their time."""

    def __len__(self) -> int:
        return 2 * BATCHES * BATCH_SIZE

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        until = time.process_time() + SECONDS_TO_DECODE
        while time.process_time() < until:
            pass
        return torch.full((WIDTH,), float(index)), index % CLASSES


def run(rounds: int) -> list[Comparison]:
    """Measure resuming, bare and through the library in turn."""
    with tempfile.TemporaryDirectory() as folder:
        for who in ("bare", "library"):
            (Path(folder) / who).mkdir()
            _seconds(who, "save", folder)
            _seconds(who, "resume", folder)  # compiles what has not been compiled
        costs = []
        for turn in range(3 + rounds // ROUNDS_PER_RESUME):
            order = ("bare", "library") if turn % 2 == 0 else ("library", "bare")
            times = {who: _seconds(who, "resume", folder) for who in order}
            costs.append((times["bare"], times["library"]))
    return [Comparison("resume: process start to the next step, 400 batches into an epoch", costs)]


def _seconds(who: str, what: str, folder: str) -> float:
    command = [sys.executable, "-m", __name__, who, what, folder]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return float(answer.splitlines()[-1])


def main(who: str, what: str, folder: str) -> None:
    """Train and save, or resume and check where."""
    torch.set_num_threads(1)
    side = bare if who == "bare" else current()
    net = model()
    run = net, AdamW(net.parameters()), DataLoader(Decoded(), batch_size=BATCH_SIZE), Path(folder) / who, BATCHES
    if what == "save":
        side.train_and_save(*run)
    else:
        first = int(side.resume(*run)[0, 0])
        if first != BATCHES * BATCH_SIZE:
            raise RuntimeError(f"resumed on sample {first}, not on {BATCHES * BATCH_SIZE}")
    print(time.process_time())


if __name__ == "__main__":
    main(*sys.argv[1:])
