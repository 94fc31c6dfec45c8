"""Train with the blocks on disk, from weights in a file; print the last loss, and the sum of all parameters."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch

from meshwright import Accelerator
from tests.parallel.replicas.offload.training import Stack


def main() -> None:
    """Train, and perhaps be killed, or go on from a checkpoint."""
    parser = argparse.ArgumentParser()
    parser.add_argument("weights", type=Path)
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--offload", choices=("host", "disk"))
    parser.add_argument("--save_at", type=int)
    parser.add_argument("--killed_at", type=int)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with torch.device("meta"):
        model = Stack(options.blocks, options.width, recomputes="yes")
    model.load_state_dict(torch.load(options.weights, mmap=True, weights_only=True), assign=True)
    accelerator = Accelerator(cpu=True, offload=options.offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    first = 0
    if options.folder is not None and options.folder.exists() and options.killed_at is None:
        accelerator.load_state(str(options.folder))
        first = options.save_at
    for step in range(first, options.steps):
        torch.manual_seed(step)
        loss = (model(torch.randn(4, 4)) - torch.randn(4, 2)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == options.save_at and first == 0:
            accelerator.save_state(str(options.folder))
        if step + 1 == options.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
    total = [param.detach().double().sum().item() for param in model.parameters()]
    print("FOUND", loss.item(), sum(total))


if __name__ == "__main__":
    main()
