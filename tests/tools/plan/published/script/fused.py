"""Kernels that keep what a fused one keeps for its backward pass: the inputs, and nothing in between."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

EPSILON = 1e-5
_PARTS = 8
"""Parts of the rows that a loss is computed in, so that no fp32 copy of all logits exists, as in one kernel."""


class RMSNorm(torch.autograd.Function):
    """Normalise by the root of the mean square."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.rsqrt(norm * norm / x.shape[-1] + EPSILON)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale.to(x.dtype)).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight, scale = ctx.saved_tensors
        normed = x * scale.to(x.dtype)
        for_weight = (grad * normed).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        for_x = grad * weight
        mean = (for_x * normed).mean(-1, keepdim=True)
        return for_x.sub_(normed.mul_(mean)).mul_(scale.to(x.dtype)), for_weight


class Rotary(torch.autograd.Function):
    """Rotate pairs of channels by the angles of their positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated = x.clone()
    first, second = x.chunk(2, dim=-1)
    to_first, to_second = rotated.chunk(2, dim=-1)
    to_first.mul_(cos).addcmul_(second, sin, value=-1)
    to_second.mul_(cos).addcmul_(first, sin)
    return rotated


class SwiGLU(torch.autograd.Function):
    """Multiply by the gate."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        gate, up = ctx.saved_tensors
        for_up = F.silu(gate).mul_(grad)
        return torch.ops.aten.silu_backward(grad * up, gate), for_up


class CrossEntropy(torch.autograd.Function):
    """Sum the losses of rows of logits, which are kept in their own format."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits, targets)
        parts = zip(logits.chunk(_PARTS), targets.chunk(_PARTS), strict=True)
        return torch.stack([F.cross_entropy(part.float(), target, reduction="sum") for part, target in parts]).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets = ctx.saved_tensors
        for_logits = torch.empty_like(logits)
        for part, target, result in zip(
            logits.chunk(_PARTS), targets.chunk(_PARTS), for_logits.chunk(_PARTS), strict=True
        ):
            chances = torch.softmax(part.float(), -1)
            result.copy_(
                chances.scatter_add_(1, target[:, None], -torch.ones_like(target[:, None], dtype=chances.dtype))
            )
        return for_logits.mul_(grads[0]), None


class SplitCrossEntropy(torch.autograd.Function):
    """The same for logits of which every rank of a group has a part of the vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Any) -> Tensor:
        highest = logits.amax(-1).float()
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        parts = zip(logits.chunk(_PARTS), highest.chunk(_PARTS), strict=True)
        total = torch.cat([(part.float() - high[:, None]).exp_().sum(-1) for part, high in parts])
        own, present = _own_targets(logits, targets, group)
        reached = torch.where(present, logits.gather(1, own[:, None])[:, 0].float(), 0.0)
        sums = torch.stack([total, reached])
        dist.all_reduce(sums, group=group)
        log_total = sums[0].log() + highest
        ctx.save_for_backward(logits, own, present, log_total)
        return (log_total - sums[1]).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, own, present, log_total = ctx.saved_tensors
        for_logits = torch.empty_like(logits)
        pieces = (tensor.chunk(_PARTS) for tensor in (logits, own, present, log_total, for_logits))
        for part, target, here, log_sum, result in zip(*pieces, strict=True):
            chances = (part.float() - log_sum[:, None]).exp_()
            result.copy_(chances.scatter_add_(1, target[:, None], -here[:, None].to(chances.dtype)))
        return for_logits.mul_(grads[0]), None, None


def _own_targets(logits: Tensor, targets: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """Return the targets as columns of this rank's part, and which of them are in it."""
    own = targets - dist.get_rank(group) * logits.shape[-1]
    present = (own >= 0) & (own < logits.shape[-1])
    return own.clamp(0, logits.shape[-1] - 1), present
