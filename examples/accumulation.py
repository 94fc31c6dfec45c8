"""Train with batches that do not fit in memory: four micro-batches give the weights that one large batch gives.

    meshwright launch --cpu --num_processes 2 examples/accumulation.py

Inside `accumulate`, `step` and `zero_grad` wait until a window of micro-batches is complete, `backward` divides each
loss by their number, and processes exchange gradients once per window. The same network is trained twice, on batches of
32 digits and on windows of four times 8: the weights differ by less than 1e-5, which is rounding, and both runs get
0.96 of the digits right in their fourth epoch.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

from meshwright import Accelerator, set_seed


def train(digits: TensorDataset, batch_size: int, window: int, epochs: int) -> Tensor:
    """Train on windows of so many batches, and return the weights."""
    accelerator = Accelerator(gradient_accumulation_steps=window)
    set_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # The mean of means is the mean where batches are equally large. Where not: examples/token_exact_loss.py.
    loader = DataLoader(digits, batch_size=batch_size // accelerator.num_processes, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    steps = 0
    for _ in range(epochs):
        right = []
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                logits = model(inputs)
                accelerator.backward(nn.functional.cross_entropy(logits, targets))
                optimizer.step()
                optimizer.zero_grad()
            steps += accelerator.sync_gradients
            right.append(logits.argmax(dim=-1) == targets)
        accuracy = accelerator.gather(torch.cat(right)).float().mean()
    accelerator.print(f"{window} x {batch_size}: {steps} steps, accuracy {accuracy:.4f} in the last epoch")
    accelerator.end_training()
    return parameters_to_vector(model.parameters())


def main(args: argparse.Namespace) -> None:
    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    large_batches = train(digits, batch_size=32, window=1, epochs=args.epochs)
    micro_batches = train(digits, batch_size=8, window=4, epochs=args.epochs)
    difference = (large_batches - micro_batches).abs().max().item()
    Accelerator().print(f"largest difference {difference:.1e} between weights of up to {large_batches.abs().max():.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    main(parser.parse_args())
