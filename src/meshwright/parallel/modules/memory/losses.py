"""The cross-entropy of a linear layer's outputs, without ever holding the logits of all tokens.

[Note: gradients in the forward pass]
The logits of a language model are its largest activation: tokens x vocabulary, several times. Here they are made for a
few tokens at a time, and their gradients are taken at once: the loss is a mean or a sum, so the gradients are known up
to one factor, which the backward pass multiplies. Nothing is computed twice. torch 2.13 has such a loss too
(`torch.nn.functional.linear_cross_entropy` with options); it ignores autocast and adds bf16 losses up in bf16.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from ....errors import UnsupportedSettingError

_LOGITS_PER_CHUNK = 2**24
"""The number of logits that are held at a time by default: 64 MiB in fp32."""


class _Options(NamedTuple):
    ignore_index: int
    label_smoothing: float
    is_mean: bool
    chunk_size: int
    dtype: torch.dtype
    has_gradient: tuple[bool, bool, bool]


class _Gradients(NamedTuple):
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    """Return `cross_entropy(linear(hidden, weight, bias), targets)` without holding the logits of all tokens.

    It is for heads with large vocabularies. Call it in the model's forward pass, in place of the head and the loss.
    Products are computed in the dtype of autocast or else of `weight`, everything else in fp32.

    Args:
        hidden: The inputs of the head, of any leading shape: `(..., features)`.
        weight: The weight of the head: `(classes, features)`.
        targets: Class indices: `(...)`.
        bias: The bias of the head.
        ignore_index: Targets with this value do not count.
        label_smoothing: The share of the target that all classes share.
        reduction: "mean" or "sum"; a sum is for `accelerator.backward(loss, num_items=n)`.
        chunk_size: The number of tokens whose logits are held at a time; without it, as many as have 64 MiB of them.
    """
    _refuse(weight, targets, reduction)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: give the number of tokens of a chunk, at least 1.")
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    enabled = torch.is_grad_enabled()
    options = _Options(
        ignore_index,
        label_smoothing,
        reduction == "mean",
        chunk_size or max(1, _LOGITS_PER_CHUNK // weight.shape[0]),
        dtype,
        (
            enabled and hidden.requires_grad,
            enabled and weight.requires_grad,
            enabled and bias is not None and bias.requires_grad,
        ),
    )
    rows = hidden.reshape(-1, hidden.shape[-1])
    loss: Tensor = _ChunkedLoss.apply(rows, weight, bias, targets.reshape(-1), options)  # type: ignore[no-untyped-call]
    return loss


def _refuse(weight: Tensor, targets: Tensor, reduction: str) -> None:
    if reduction not in ("mean", "sum"):
        raise UnsupportedSettingError(
            f"linear_cross_entropy(reduction={reduction!r})",
            "gradients are computed in the forward pass, for a loss that is one number.",
            'Give "mean" or "sum".',
        )
    if targets.is_floating_point():
        raise UnsupportedSettingError(
            "linear_cross_entropy with targets of floating point",
            "class probabilities are as large as the logits.",
            "Give class indices, or use torch.nn.functional.cross_entropy.",
        )
    if isinstance(weight, DTensor):
        raise UnsupportedSettingError(
            "linear_cross_entropy with a weight that is sharded",
            "each rank has a part of the classes only.",
            "Call it in the model's forward pass, where FSDP has gathered the weight; with tensor parallelism, leave "
            "the head out of the plan.",
        )


class _ChunkedLoss(torch.autograd.Function):
    """[Note: gradients in the forward pass]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: _Options
    ) -> Tensor:
        of_hidden, of_weight, of_bias = options.has_gradient
        gradients = _Gradients(
            torch.empty_like(hidden, dtype=options.dtype) if of_hidden else None,
            torch.zeros_like(weight, dtype=torch.float32) if of_weight else None,
            torch.zeros_like(bias, dtype=torch.float32) if of_bias and bias is not None else None,
        )
        with torch.autocast(hidden.device.type, enabled=False):
            total = _sum_of_losses(hidden, weight, bias, targets, options, gradients)
        ctx.factor = 1.0
        if options.is_mean:
            ctx.factor = 1.0 / (targets != options.ignore_index).sum()
        ctx.gradients = gradients if any(options.has_gradient) else None
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        loss: Tensor = total * ctx.factor
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("A second backward pass through linear_cross_entropy: its gradients are used up.")
        factor = outputs[0] * ctx.factor
        # In place: there is no room for a second gradient of the weight.
        scaled = (None if each is None else each.mul_(factor) for each in gradients)
        typed = (None if each is None else each.to(dtype) for each, dtype in zip(scaled, ctx.dtypes, strict=True))
        return (*typed, None, None)


def _sum_of_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: _Options, gradients: _Gradients
) -> Tensor:
    """Return the sum of the losses; write or add their gradients."""
    weight = weight.to(options.dtype)
    bias = None if bias is None else bias.to(options.dtype)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for start in range(0, len(targets), options.chunk_size):
        chunk = slice(start, start + options.chunk_size)
        rows, labels = hidden[chunk].to(options.dtype), targets[chunk]
        logits = nn.functional.linear(rows, weight, bias).float()
        losses = _loss_and_gradient(logits, labels, options)
        total += losses.sum()
        if not any(options.has_gradient):
            continue
        if gradients.bias is not None:
            gradients.bias.add_(logits.sum(0))
        products = logits.to(options.dtype)
        del logits
        if gradients.hidden is not None:
            torch.mm(products, weight, out=gradients.hidden[chunk])
        if gradients.weight is not None and options.dtype == torch.float32:
            gradients.weight.addmm_(products.T, rows)
        elif gradients.weight is not None:
            gradients.weight.add_(products.T @ rows)
    return total


def _loss_and_gradient(logits: Tensor, labels: Tensor, options: _Options) -> Tensor:
    """Return the losses of some tokens, and replace their logits by the gradients of these."""
    smoothing = options.label_smoothing
    counted = labels != options.ignore_index
    index = labels.where(counted, 0).unsqueeze(1)
    logits.sub_(logits.amax(1, keepdim=True))
    losses = (smoothing - 1) * logits.gather(1, index)
    if smoothing:
        losses -= smoothing * logits.mean(1, keepdim=True)
    sums = logits.exp_().sum(1, keepdim=True)
    losses += sums.log()
    logits.div_(sums)
    if smoothing:
        logits -= smoothing / logits.shape[1]
    logits.scatter_add_(1, index, torch.full_like(sums, smoothing - 1))
    logits.mul_(counted.unsqueeze(1))
    return losses.squeeze(1).where(counted, 0)
