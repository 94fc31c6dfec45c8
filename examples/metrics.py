"""Measure on several processes as on one: every sample counts, and counts once.

    meshwright launch --cpu --num_processes 2 examples/metrics.py

359 digits cannot be divided evenly, so a few are handed out twice to keep the processes in step. `gather` returns
them all; `gather_for_metrics` drops the repeated ones, and keeps the order of the data. So the confusion matrix and
the F1 score of 0.97, by scikit-learn, are those of exactly 359 digits.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import confusion_matrix, f1_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from meshwright import Accelerator, set_seed


def main(args: argparse.Namespace) -> None:
    accelerator = Accelerator()
    set_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    train, test = random_split(digits, [0.8, 0.2])
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=32)
    )
    for _ in range(args.epochs):
        for inputs, targets in train_loader:
            accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()

    model.eval()
    predictions, truth, num_gathered = [], [], 0
    for inputs, targets in test_loader:
        with torch.no_grad():
            answers = model(inputs).argmax(dim=-1)
        num_gathered += len(accelerator.gather(answers))
        answers, targets = accelerator.gather_for_metrics((answers, targets))
        predictions += answers.tolist()
        truth += targets.tolist()

    accelerator.print(f"gather: {num_gathered} answers, gather_for_metrics: {len(predictions)}")
    in_order = truth == [label.item() for _, label in test]
    accelerator.print(f"in the order of the data: {in_order}")
    accelerator.print(confusion_matrix(truth, predictions))
    accelerator.print(f"F1 {f1_score(truth, predictions, average='macro'):.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    main(parser.parse_args())
