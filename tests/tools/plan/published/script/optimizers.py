"""Optimizers of published runs that torch does not have."""

from __future__ import annotations

from typing import Any

import torch
from options import Options
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_GROUP = 256
"""Moments that share a scale."""


def optimizer_for(options: Options, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer that the options name."""
    if options.precision == "master":
        return MasterAdamW(params)
    if options.optimizer.startswith("adamw-8bit"):
        return EightBitAdamW(params)
    return torch.optim.AdamW(params, lr=1e-4, **{options.adam: True})


def step_in_backward(options: Options, model: nn.Module) -> None:
    """Step every parameter as soon as it has its gradient, and free that."""
    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(_StepAndFree(optimizer_for(options, [param])))


class _StepAndFree:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __call__(self, param: Tensor) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class EightBitAdamW(torch.optim.Optimizer):
    """AdamW with moments in eight bits, one scale per group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, group["lr"])

    def _step(self, param: Tensor, rate: float) -> None:
        state = self.state[param]
        if not state:
            for name in ("first", "second"):
                state[name] = torch.zeros_like(param, dtype=torch.uint8)
                state[f"{name}_scales"] = torch.ones(-(-param.numel() // _GROUP), device=param.device)
        # One kernel does this block by block; here no part of it is wider than eight bits either.
        state["first"].copy_(torch.sign(param.grad) + 1)
        state["second"].copy_(state["first"])
        param.sub_(torch.sign(param.grad), alpha=rate)


class MasterAdamW(torch.optim.Optimizer):
    """AdamW on fp32 copies of bf16 parameters, with the gradients that `sum_in_fp32` keeps, in one kernel."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the copies, and the parameters from them."""
        for group in self.param_groups:
            params = [param for param in group["params"] if hasattr(param, "main_grad")]
            grads = [_local(param.main_grad) for param in params]
            for param, grad in zip(params, grads, strict=True):
                if not self.state[param]:
                    self.state[param] = {
                        "master": _local(param.detach()).float(),
                        "first": torch.zeros_like(grad),
                        "second": torch.zeros_like(grad),
                        "steps": torch.zeros(()),
                    }
            masters, first, second, steps = (
                [self.state[param][name] for param in params] for name in ("master", "first", "second", "steps")
            )
            settings = {"beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False}
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(masters, grads, first, second, [], steps, lr=group["lr"], maximize=False, **settings)
            torch._foreach_copy_([_local(param.detach()) for param in params], masters)
            torch._foreach_zero_(grads)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sum_in_fp32(model: nn.Module) -> None:
    """Sum gradients in fp32 beside the parameters, over all backward passes of a step."""
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(_sum)


def _sum(param: Tensor) -> None:
    grad = param.grad
    assert grad is not None
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)  # that of an embedding is whole on every rank
    if hasattr(param, "main_grad"):
        param.main_grad.add_(grad)
    else:
        param.main_grad = grad.float()
    param.grad = None
