"""Train the small transformer with optimizers that need whole matrices, on any mesh.

The model is in double precision: Muon rounds to bfloat16, so that gradients which differ in their last bits in single
precision give updates that differ visibly, on any two numbers of processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright import Accelerator, step_full_tensors

from ...small_transformer import LENGTH, VOCABULARY, loss_of, model
from ...ways import WAYS

GLOBAL_BATCH = 8


class Shampoo(Optimizer):
    """Precondition matrices by both sides, as Shampoo does; step vectors plainly. Groups count the steps."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                update = param.grad
                if param.ndim == 2:
                    state = self.state[param]
                    if not state:
                        state["sides"] = [torch.zeros(size, size, dtype=param.dtype) for size in param.shape]
                        state["momentum"] = torch.zeros_like(param)
                    left, right = state["sides"]
                    left += update @ update.T
                    right += update.T @ update
                    state["momentum"].lerp_(_root(left) @ update @ _root(right), 0.5)
                    update = state["momentum"] / group["step"] ** 0.5
                param.sub_(update, alpha=group["lr"])


def _root(matrix: Tensor) -> Tensor:
    """Return the matrix to the power of -1/4."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * (values.clamp(min=0) + 1e-6) ** -0.25) @ vectors.T


def optimizers_of(net: nn.Module, kind: str) -> list[Optimizer]:
    """Make the optimizers of one kind, before anything is prepared."""
    if kind == "shampoo":
        return [step_full_tensors(Shampoo(net.parameters()), only=lambda param: param.ndim == 2)]
    matrices = [param for name, param in net.named_parameters() if param.ndim == 2 and "blocks" in name]
    own = {id(param) for param in matrices}
    rest = [param for param in net.parameters() if id(param) not in own]
    half = len(matrices) // 2
    groups = [{"params": matrices[:half]}, {"params": matrices[half:], "lr": 5e-3}]
    return [torch.optim.Muon(groups, lr=2e-2), torch.optim.AdamW(rest, lr=1e-2)]


def train(
    *,
    way: str,
    steps: int,
    kind: str = "muon",
    first: int = 0,
    load_from: Path | None = None,
    save_to: Path | None = None,
    accumulation: int = 1,
    clip: float | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train from one step on; return the parameters, the learning rates and what this rank has of the state."""
    options = {**WAYS[way][1](), **options, "step_scheduler_with_optimizer": False}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, **options)
    net: Any = model().double()
    plain = optimizers_of(net, kind)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.8) for each in plain]
    net, *prepared = accelerator.prepare(net, *plain, *schedulers)
    optimizers, schedulers = prepared[: len(plain)], prepared[len(plain) :]
    if load_from is not None:
        accelerator.load_state(load_from)
    shares, share = accelerator.strategy.num_data_ranks, accelerator.strategy.data_rank
    for step in range(first, first + steps):
        for inputs, targets in batches(step, accumulation):
            with accelerator.accumulate(net):
                given, wanted = inputs.chunk(shares)[share], targets.chunk(shares)[share]
                accelerator.forward_backward(net, given, target=wanted, loss_fn=loss_of)
                if clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), clip)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    if save_to is not None:
        accelerator.save_state(str(save_to))
    return {
        "parameters": {name: whole(param) for name, param in net.named_parameters()},
        "rates": [group["lr"] for optimizer in optimizers for group in optimizer.param_groups],
        "stated": [sum(1 for state in optimizer.state.values() if state) for optimizer in optimizers],
    }


def batches(step: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Make the micro-batches of a step."""
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(0, VOCABULARY, (count, GLOBAL_BATCH, LENGTH + 1), generator=generator)
    return [(batch[:, :-1], batch[:, 1:]) for batch in text]


def whole(param: Any) -> Tensor:
    """Return a full parameter."""
    full: Tensor = param.full_tensor() if hasattr(param, "full_tensor") else param
    return full.detach().clone()


def off_by(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of two models; the parameters of `one` may be those of a stage."""
    return max(float((value - other[name]).abs().max()) for name, value in one.items())
