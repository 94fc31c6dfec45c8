"""Train without a learning-rate schedule: a schedule-free optimizer averages the weights instead.

    pip install schedulefree
    meshwright launch --cpu --num_processes 2 examples/schedule_free.py

Such an optimizer has two sets of weights: those where gradients are taken, and an average, which is what you want in
the end. `optimizer.train()` and `optimizer.eval()` put one or the other into the model. Call them on the prepared
optimizer, where you call `model.train()` and `model.eval()`, and before saving. Six epochs reach an accuracy of 0.97.
"""

import argparse

import torch
from schedulefree import AdamWScheduleFree
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from meshwright import Accelerator, set_seed


def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    right = []
    with torch.no_grad():
        for inputs, targets in loader:
            right.append(accelerator.gather_for_metrics(model(inputs).argmax(dim=-1) == targets))
    return torch.cat(right).float().mean().item()


def main(args: argparse.Namespace) -> None:
    accelerator = Accelerator()
    set_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    train, test = random_split(digits, [0.8, 0.2])
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    optimizer = AdamWScheduleFree(model.parameters(), lr=args.lr, warmup_steps=20)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=64)
    )

    for epoch in range(args.epochs):
        model.train()
        optimizer.train()
        for inputs, targets in train_loader:
            accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        newest = evaluate(accelerator, model, test_loader)
        optimizer.eval()
        average = evaluate(accelerator, model, test_loader)
        accelerator.print(f"epoch {epoch + 1}: accuracy {average:.4f} (newest weights: {newest:.4f})")

    accelerator.save_model(model, args.output)  # after `optimizer.eval()`: the average
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=2e-2)
    parser.add_argument("--output", default="schedule_free", help="where the model is saved")
    main(parser.parse_args())
