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
    """AdamW on fp32 copies of bf16 parameters, with the gradients that `sum_in_fp32` keeps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the copies, and the parameters from them."""
        for group in self.param_groups:
            params = [param for param in group["params"] if hasattr(param, "main_grad")]
            for param in params:
                if not self.state[param]:
                    self.state[param] = {
                        "master": param.detach().float(),
                        "first": torch.zeros_like(param.main_grad),
                        "second": torch.zeros_like(param.main_grad),
                    }
                state = self.state[param]
                state["first"].lerp_(param.main_grad, 0.1)
                state["second"].mul_(0.999).addcmul_(param.main_grad, param.main_grad, value=0.001)
                state["master"].addcdiv_(state["first"], state["second"].sqrt().add_(1e-8), value=-group["lr"])
                param.copy_(state["master"])
                param.main_grad.zero_()


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
