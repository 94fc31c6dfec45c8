"""Linear layers: plain ones, ones with a low-rank correction that alone is trained, and ones in four bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from options import Options
from torch import Tensor, nn

_GROUP = 64
"""Weights that share a scale."""


def linear(options: Options, target: str, inputs: int, outputs: int, *, bias: bool) -> nn.Module:
    """Return a layer as the options ask for it."""
    if not options.lora_rank:
        return nn.Linear(inputs, outputs, bias=bias)
    base = FourBits(inputs, outputs) if options.nf4 else nn.Linear(inputs, outputs, bias=bias)
    chosen = options.lora_targets == "all" or target in options.lora_targets
    return LowRank(base, options, inputs, outputs) if chosen else base


def packed_projection(options: Options, *, bias: bool) -> nn.Module:
    """Return the projection to queries, keys and values in one product."""
    keys = options.kv_heads * options.hidden // options.heads
    outputs = options.hidden + 2 * keys
    if not options.lora_rank:
        return nn.Linear(options.hidden, outputs, bias=bias)
    base = FourBits(options.hidden, outputs) if options.nf4 else nn.Linear(options.hidden, outputs, bias=bias)
    return PackedLowRank(base, options, keys)


class LowRank(nn.Module):
    """A frozen layer with a trained correction of low rank."""

    def __init__(self, base: nn.Module, options: Options, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = base
        self.dropout = nn.Dropout(options.lora_dropout) if options.lora_dropout else nn.Identity()
        self.lora_a = nn.Linear(inputs, options.lora_rank, bias=False)
        self.lora_b = nn.Linear(options.lora_rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.lora_b(self.lora_a(self.dropout(x)))


class PackedLowRank(nn.Module):
    """A frozen projection with corrections of the queries and the values."""

    def __init__(self, base: nn.Module, options: Options, keys: int) -> None:
        super().__init__()
        self.base, self.rank, self.keys = base, options.lora_rank, keys
        self.dropout = nn.Dropout(options.lora_dropout) if options.lora_dropout else nn.Identity()
        self.lora_a = nn.Linear(options.hidden, 2 * options.lora_rank, bias=False)
        self.lora_query = nn.Linear(options.lora_rank, options.hidden, bias=False)
        self.lora_value = nn.Linear(options.lora_rank, keys, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, value = self.lora_a(self.dropout(x)).split(self.rank, -1)
        nothing = x.new_zeros(*x.shape[:-1], self.keys)
        correction = torch.cat([self.lora_query(query), nothing, self.lora_value(value)], -1)
        return self.base(x) + 2.0 * correction


class FourBits(nn.Module):
    """A frozen layer whose weight is kept in four bits, with scales in eight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.shape = outputs, inputs
        count = inputs * outputs
        self.register_buffer("codes", torch.randint(0, 256, (count // 2,), dtype=torch.uint8))
        self.register_buffer("scales", torch.full((count // _GROUP, 1), 8, dtype=torch.uint8))
        self.register_buffer("scale_of_scales", torch.full((-(-count // (256 * _GROUP)),), 1e-3, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return _FourBitProduct.apply(x, self)

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in a format of computation."""
        low, high = (self.codes & 15).to(dtype), (self.codes >> 4).to(dtype)
        weight = torch.stack([low, high], -1).view(-1, _GROUP).sub_(8).mul_(self.scales.to(dtype))
        return weight.mul_(self.scale_of_scales[0]).view(self.shape)


class _FourBitProduct(torch.autograd.Function):
    """A product with a weight that is made for it, forward and backward, and not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FourBits) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.weight(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] @ ctx.layer.weight(grads[0].dtype), None
