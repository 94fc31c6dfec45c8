"""Small models, data and loops that several tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from meshwright import Accelerator, set_seed

FEATURES, CLASSES = 12, 4


def make_model(dropout: float = 0.0, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, CLASSES))


def make_data(samples: int, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(samples, FEATURES, generator=generator)
    labels = (features @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(dim=1)
    return TensorDataset(features, labels)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    features, labels = batch
    return nn.functional.cross_entropy(model(features), labels)


def parameters_of(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def loss_trace(global_batch: int, steps: int, **accelerator_options: Any) -> list[float]:
    """Train with shuffling at a fixed global batch and return the mean loss over all ranks, step by step."""
    accelerator = Accelerator(cpu=True, **accelerator_options)
    set_seed(7)
    model = make_model(seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(make_data(256), batch_size=global_batch // accelerator.num_processes, shuffle=True)
    set_seed(7)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    trace: list[float] = []
    while len(trace) < steps:
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            trace.append(accelerator.reduce(loss.detach(), "mean").item())
    return trace[:steps]
