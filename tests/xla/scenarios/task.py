"""A small model with tied weights, its data, and its training loop, for the scenarios."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from meshwright import Accelerator, AcceleratorState, set_seed
from meshwright.runtime.devices import xla

SAMPLES, BATCH_SIZE = 48, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.tanh(self.layer(inputs))


class Model(nn.Module):
    """Two blocks between tied layers; 5 outputs, which 4 devices cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16, bias=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(16, 16, bias=False)
        self.last.weight = self.first.weight
        self.head = nn.Linear(16, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.last(hidden))


def data() -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.arange(SAMPLES), torch.randn(SAMPLES, 16, generator=made), torch.randn(SAMPLES, 5, generator=made) / 4
    )


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return (model(inputs) / 4 - targets).square().mean()


class Run:
    """One training from its beginning, on what the settings ask for."""

    def __init__(self, *, clip: float | None = None, **settings: Any) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        set_seed(0)
        self.clip = clip
        self.accelerator = Accelerator(**settings)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = DataLoader(data(), batch_size=BATCH_SIZE, shuffle=True)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.compiled: list[int] = []
        self.seen: list[list[int]] = []
        self.batches = self._endless()

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def train(self, steps: int) -> list[float]:
        """Take so many micro-batches; return their losses."""
        losses = []
        for _, (indices, inputs, targets) in zip(range(steps), self.batches, strict=False):
            with self.accelerator.accumulate(self.model):
                loss = loss_of(self.model, inputs, targets)
                self.accelerator.backward(loss)
                if self.clip is not None and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
            self.seen.append(indices.tolist())
            self.compiled.append(xla.compilations())
        return losses

    def late_compilations(self, after: int = 3) -> int:
        """Return how many graphs were compiled after so many micro-batches."""
        return self.compiled[-1] - self.compiled[after - 1]

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}

    def moments(self) -> list[Tensor]:
        return [self.optimizer.state[param]["exp_avg"].cpu().clone() for param in self.model.parameters()]


def largest_difference(some: list[float], others: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(some, others, strict=True))


def equal(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)
