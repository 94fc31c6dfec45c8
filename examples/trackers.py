"""Log a run without an account, and look at it in a browser or in the terminal.

    meshwright launch --cpu --num_processes 2 examples/trackers.py
    meshwright report runs/trackers                # writes a page; --live draws in the terminal

`log_with` takes names (jsonl, tensorboard, wandb, mlflow, ...), several of them, or objects of your own, like the one
here that keeps the best value. `reduce="mean"` averages over the processes before it is logged. The lowest loss of
three epochs is 0.02, or 0.17 with two processes, which take half as many steps.
"""

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from meshwright import Accelerator, GeneralTracker, on_main_process, set_seed


class Best(GeneralTracker):
    """Remember the lowest loss of the run, and when it was."""

    name = "best"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.loss, self.step = float("inf"), 0

    @property
    def tracker(self) -> "Best":
        """Return what `get_tracker("best", unwrap=True)` gives."""
        return self

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the settings of the run."""
        self.config = values

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Compare with the lowest so far."""
        if values["loss"] < self.loss:
            self.loss, self.step = values["loss"], step


def main(args: argparse.Namespace) -> None:
    best = Best()
    accelerator = Accelerator(log_with=["jsonl", best], project_dir=args.project)
    accelerator.init_trackers("digits", config=vars(args))
    set_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(digits, batch_size=32, shuffle=True))

    step = 0
    for epoch in range(args.epochs):
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            accelerator.log({"loss": loss, "epoch": epoch + 1}, step=step, reduce="mean")

    accelerator.end_training()  # writes what is still on its way to the trackers
    accelerator.print(f"{step} steps, lowest loss {best.loss:.4f} at step {best.step}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--project", default="runs/trackers")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=5e-3)
    main(parser.parse_args())
