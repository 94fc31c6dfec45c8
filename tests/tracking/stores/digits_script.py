"""A digits classifier that logs with SwanLab's own tracker, made before the Accelerator as SwanLab shows it."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from swanlab.integration.accelerate import SwanLabTracker
from torch.utils.data import DataLoader, TensorDataset

from meshwright import Accelerator

EPOCHS, BATCH_SIZE, NUM_SAMPLES = 5, 50, 600


def main() -> None:
    """Train, and print the losses that are logged."""
    config = {"epochs": EPOCHS, "lr": 0.1}
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    samples = TensorDataset(torch.tensor(images[:NUM_SAMPLES] / 16.0).float(), torch.tensor(labels[:NUM_SAMPLES]))

    accelerator = Accelerator(log_with=SwanLabTracker("DIGITS"))
    accelerator.init_trackers("DIGITS", config=config)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    loader = DataLoader(samples, batch_size=BATCH_SIZE, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            accelerator.log({"training_loss": loss, "epoch": epoch})
            accelerator.print(f"loss {loss.item()!r}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
