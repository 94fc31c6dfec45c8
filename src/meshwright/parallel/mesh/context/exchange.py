"""Exchange keys, values and heads between the processes that share a sequence; gradients take the way back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ....runtime.collectives.operations import all_gather_single
from .sharding import Sharding, select

_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Gather(torch.autograd.Function):
    """Join the parts of all processes in the order of the sequence, which is the first dimension, before the batch.

    The gradient of a part is the sum over all processes. Orders are inverted, not their gathering: adding up is slow.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, sharding: Sharding, group: Any) -> Tensor:
        ctx.sharding, ctx.group = sharding, group
        sizes = sharding.sizes
        longest = max(sizes)
        missing = longest - len(part)
        padded = torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) if missing else part.contiguous()
        parts = part.new_empty(len(sizes) * longest, *part.shape[1:])
        all_gather_single(parts, padded, group=group)
        if min(sizes) < longest:
            parts = torch.cat([one[:size] for one, size in zip(parts.chunk(len(sizes)), sizes, strict=True)])
        return _reordered(parts, sharding, "inverse")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Sum the gradients of this process's part."""
        sharding: Sharding = ctx.sharding
        sizes = sharding.sizes
        longest = max(sizes)
        gradient = _reordered(gradients[0], sharding, "order").contiguous()
        if min(sizes) < longest:
            padded = gradient.new_zeros(len(sizes), longest, *gradient.shape[1:])
            for one, part in zip(padded, torch.split(gradient, list(sizes)), strict=True):
                one[: len(part)] = part
            gradient = padded.flatten(0, 1)
        own = gradient.new_empty(longest, *gradient.shape[1:])
        _reduce_scatter(own, gradient, group=ctx.group)
        return own[: sharding.own_length], None, None


def _reordered(tensor: Tensor, sharding: Sharding, name: Literal["order", "inverse"]) -> Tensor:
    """Select positions of a tensor whose first dimensions are the sequence and the batch."""
    if sharding.is_in_order:
        return tensor
    positions = sharding.on(tensor.device, name)
    if len(positions) == 1:
        return tensor.index_select(0, positions[0])
    return select(tensor.transpose(0, 1), 1, positions).transpose(0, 1)


class _AllToAll(torch.autograd.Function):
    """Send consecutive pieces of the first dimension to the processes, and receive theirs."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
        ctx.way_back = (received, sent, group)
        return _all_to_all(tensor, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Send the gradients back."""
        return _all_to_all(gradients[0], *ctx.way_back), None, None, None


def _all_to_all(tensor: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    result = tensor.new_empty(sum(received), *tensor.shape[1:])
    dist.all_to_all_single(result, tensor.contiguous(), list(received), list(sent), group=group)
    return result


def gathered(tensor: Tensor, dim: int, sharding: Sharding, group: Any) -> Tensor:
    """Return the whole of a sharded tensor in the order of the sequence; its first dimension is the batch."""
    small = tensor.dtype == torch.bool
    part = tensor.to(torch.uint8) if small else tensor
    if len(part) < len(sharding.order):  # one for all sequences, which are divided each for itself
        part = part.expand(len(sharding.order), *part.shape[1:])
    whole: Tensor = _Gather.apply(part.movedim(dim, 0), sharding, group).movedim(0, dim)  # type: ignore[no-untyped-call]
    return whole.to(torch.bool) if small else whole


def gathered_keys(key: Tensor, value: Tensor, sharding: Sharding, group: Any) -> tuple[Tensor, Tensor]:
    """Return the keys and values, [batch, heads, length, width], of all positions, by one collective."""
    both = gathered(torch.cat([key, value], dim=-1), 2, sharding, group)
    return both[..., : key.shape[-1]], both[..., key.shape[-1] :]


def repeats_for(query_heads: int, key_heads: int, size: int) -> int:
    """Return how often key heads are repeated so that processes get equal numbers of heads that belong together."""
    for repeats in range(1, query_heads // key_heads + 1):
        if key_heads * repeats % size == 0 and query_heads % (key_heads * repeats) == 0:
            return repeats
    return query_heads // key_heads


def to_heads(
    query: Tensor, key: Tensor, value: Tensor, sharding: Sharding, group: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange some positions of all heads for all positions of some heads, by one collective; parts are in order."""
    size = len(sharding.sizes)
    repeats = repeats_for(query.shape[1], key.shape[1], size)
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    # [batch, heads, positions, width] -> [processes, positions, batch, heads of a process, width]
    grouped = [torch.unflatten(heads, 1, (size, -1)).permute(1, 3, 0, 2, 4) for heads in (query, key, value)]
    packed = torch.cat([heads.flatten(3) for heads in grouped], dim=-1)
    sent = [sharding.own_length] * size
    whole = _AllToAll.apply(packed.flatten(0, 1), sent, sharding.sizes, group)  # type: ignore[no-untyped-call]
    shapes = [tuple(heads.shape[3:]) for heads in grouped]
    parts = whole.split([math.prod(shape) for shape in shapes], dim=-1)
    q, k, v = (part.unflatten(-1, shape).permute(1, 2, 0, 3) for part, shape in zip(parts, shapes, strict=True))
    return q, k, v


def from_heads(output: Tensor, sharding: Sharding, group: Any) -> Tensor:
    """Exchange all positions of some heads for some positions of all heads."""
    size = len(sharding.sizes)
    heads = output.shape[1]
    whole = output.permute(2, 0, 1, 3).flatten(2)
    received = [sharding.own_length] * size
    parts = _AllToAll.apply(whole, sharding.sizes, received, group)  # type: ignore[no-untyped-call]
    # [processes * positions, batch, heads of a process * width] -> [batch, heads, positions, width]
    grouped = torch.unflatten(torch.unflatten(parts, 0, (size, -1)), -1, (heads, -1))
    return grouped.permute(2, 0, 3, 1, 4).flatten(1, 2)
