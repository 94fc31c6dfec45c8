"""The task that every benchmark trains: so small that nothing hides what a library adds."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

WIDTH = 64
CLASSES = 8
BATCH_SIZE = 8
ACCUMULATION = 4

loss_of = nn.CrossEntropyLoss()


def model() -> nn.Module:
    """Make an MLP of three layers, the same one every time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
    )


def data(batches: int = 40) -> Dataset[tuple[Tensor, ...]]:
    """Make random samples: this many full batches."""
    samples = batches * BATCH_SIZE
    return TensorDataset(torch.randn(samples, WIDTH), torch.randint(0, CLASSES, (samples,)))


def loader() -> DataLoader[tuple[Tensor, ...]]:
    """Make a plain loader of the samples."""
    return DataLoader(data(), batch_size=BATCH_SIZE)
