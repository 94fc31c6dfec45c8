"""Train a model on a mesh and a plain copy of it on every process, and return their differences."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from meshwright import Accelerator

from .small_transformer import LENGTH, VOCABULARY, loss_of


def off_by(
    accelerator: Accelerator, model: nn.Module, steps: int = 3, alone: nn.Module | None = None, **options: Any
) -> dict[str, float]:
    """Return the largest differences in losses, gradients, norms and parameters over some steps.

    A model that is spread already cannot be copied: give a plain one like it as `alone`.
    """
    alone = copy.deepcopy(model) if alone is None else alone
    by_itself = torch.optim.SGD(alone.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    worst = dict.fromkeys(("loss", "gradients", "norm", "parameters"), 0.0)
    for step in range(steps):
        found = one_step(accelerator, model, optimizer, alone, by_itself, seed=step, **options)
        worst = {name: max(value, found[name]) for name, value in worst.items()}
    return worst


def one_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    alone: nn.Module,
    by_itself: torch.optim.Optimizer,
    *,
    seed: int = 0,
    microbatches: int = 1,
) -> dict[str, float]:
    """Take one step with both; return the differences."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, VOCABULARY, (microbatches, 4, LENGTH + 1), generator=generator)
    shares, share = accelerator.strategy.num_data_ranks, accelerator.strategy.data_rank
    losses = []
    for batch in text:
        wanted = loss_of(alone(batch[:, :-1]), batch[:, 1:])
        (wanted / microbatches).backward()
        own = batch.chunk(shares)[share]
        with accelerator.accumulate(model):
            loss = accelerator.forward_backward(model, own[:, :-1], target=own[:, 1:], loss_fn=loss_of)
        losses.append(difference(accelerator.reduce(loss.detach(), "mean"), wanted))
    expected = dict(alone.named_parameters(remove_duplicate=False))
    own_params = {name.removeprefix("module."): p for name, p in model.named_parameters(remove_duplicate=False)}
    gradients = [difference(param.grad, expected[name].grad) for name, param in own_params.items()]
    norm = torch.nn.utils.clip_grad_norm_([p for p in alone.parameters() if p.grad is not None], 1.0)
    norms = difference(torch.as_tensor(accelerator.clip_grad_norm_(model.parameters(), 1.0)), norm)
    for each in (optimizer, by_itself):
        each.step()
        each.zero_grad()
    parameters = [difference(param, expected[name]) for name, param in own_params.items()]
    return {"loss": max(losses), "gradients": max(gradients), "norm": norms, "parameters": max(parameters)}


def difference(one: Tensor | None, other: Tensor | None) -> float:
    """Return the largest difference of two tensors; two that are missing are equal."""
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    whole = one.full_tensor() if hasattr(one, "full_tensor") else one
    return float((whole.detach() - other.detach()).abs().max())
