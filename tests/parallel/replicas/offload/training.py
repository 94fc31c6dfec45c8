"""A model of repeated blocks, trained in memory and with its blocks on the host."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright import Accelerator
from tests.simulated_accelerator.faults import moves_in_place

WIDTH = 16


class Residual(nn.Module):
    """A block: a residual branch of two products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Stack(nn.Module):
    """An embedding, many blocks, and a head."""

    def __init__(self, num_blocks: int, width: int = WIDTH, recomputes: str | None = None) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 2)
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            if self.recomputes is not None and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=self.recomputes == "reentrant")
            else:
                x = block(x)
        out: Tensor = self.head(x)
        return out


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
}


def train(
    *,
    steps: int = 5,
    num_blocks: int = 5,
    optimizer: str = "AdamW",
    max_norm: float | None = None,
    recomputes: str | None = None,
    own_backward: bool = False,
    on_step: Callable[[int, Accelerator], None] | None = None,
    width: int = WIDTH,
    seed: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Train, and return the losses and the state of model and optimizer on the CPU."""
    torch.manual_seed(seed)
    accelerator = Accelerator(**options)
    model = Stack(num_blocks, width, recomputes)
    torch.manual_seed(0)
    stepper = OPTIMIZERS[optimizer](model.parameters())
    batches = torch.randn(steps, accelerator.num_processes, 8, 4)
    targets = torch.randn(steps, accelerator.num_processes, 8, 2)
    with nullcontext() if accelerator.device.type == "cpu" else moves_in_place():
        model, stepper = accelerator.prepare(model, stepper)
    losses = []
    for step in range(steps):
        with accelerator.accumulate(model):
            mine = batches[step, accelerator.process_index].to(accelerator.device)
            target = targets[step, accelerator.process_index].to(accelerator.device)
            loss = nn.functional.mse_loss(model(mine), target)
            if own_backward:
                loss.backward()
            else:
                accelerator.backward(loss)
            if max_norm is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            stepper.step()
            stepper.zero_grad()
        losses.append(loss.detach())
        if on_step is not None:
            on_step(step, accelerator)
    state = accelerator.unwrap_model(model).state_dict()
    steps = getattr(accelerator.strategy, "stepping", None)
    return {
        "losses": [loss.item() for loss in losses],
        "parameters": {name: value.cpu().clone() for name, value in state.items()},
        "moments": [
            {name: value.cpu().clone() for name, value in state.items() if isinstance(value, Tensor)}
            for _, state in sorted(stepper.state_dict()["state"].items())
        ],
        "steps_in_backward": None if steps is None else steps.decision,
        "report": getattr(accelerator.strategy, "report", None),
    }


def assert_bit_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare two runs bitwise."""
    assert all(math.isfinite(loss) for loss in expected["losses"])
    assert found["losses"] == expected["losses"]
    assert found["parameters"].keys() == expected["parameters"].keys()
    for name, value in expected["parameters"].items():
        assert torch.equal(found["parameters"][name], value), name
    for mine, others in zip(found["moments"], expected["moments"], strict=True):
        assert mine.keys() == others.keys()
        assert all(torch.equal(mine[name], others[name]) for name in others)
