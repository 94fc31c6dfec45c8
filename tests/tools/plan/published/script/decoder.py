"""Decoders of the families that published runs trained."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any

import fused
import torch
import torch.nn.functional as F
from lora import linear, packed_projection
from options import LLAMA, MPT, NEOX, Options
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

EPSILON = fused.EPSILON
_COLUMNS = ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up")
TENSOR_PLAN = {
    "embedding": "embedding_rowwise",
    **{f"blocks.*.{name}": "colwise" for name in _COLUMNS},
    "blocks.*.attention.out": "rowwise",
    "blocks.*.mlp.down": "rowwise",
    "head": "vocab",
}


class RMSNorm(nn.Module):
    """Normalise by the root of the mean square: in fp32 by single operations, or by one kernel."""

    def __init__(self, hidden: int, *, is_fused: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.is_fused = is_fused

    def forward(self, x: Tensor) -> Tensor:
        if self.is_fused:
            return fused.RMSNorm.apply(x, self.weight)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
        return wide.type_as(x) * self.weight


def rotation_of(positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines by which channels are rotated at these positions."""
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width
    angles = positions[:, :, None, None].float() * (10_000.0**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor], *, is_fused: bool) -> Tensor:
    """Rotate pairs of channels; `rotation` may be for the first of them only."""
    cos, sin = rotation
    width = 2 * cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat([rotate(x[..., :width], rotation, is_fused=is_fused), x[..., width:]], -1)
    if is_fused:
        return fused.Rotary.apply(x, cos.to(x.dtype), sin.to(x.dtype))
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.complex(cos.float(), sin.float())).flatten(-2).type_as(x)


class Attention(nn.Module):
    """Causal attention with grouped heads."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self.width = options.hidden // options.heads
        biased = options.family != LLAMA
        if options.packed:
            self.packed = packed_projection(options, bias=biased)
        else:
            self.query = linear(options, "q", options.hidden, options.hidden, bias=biased)
            self.key = linear(options, "k", options.hidden, options.kv_heads * self.width, bias=biased)
            self.value = linear(options, "v", options.hidden, options.kv_heads * self.width, bias=biased)
        self.out = linear(options, "o", options.hidden, options.hidden, bias=biased)

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        batch, length = x.shape[:2]
        if self.options.packed:
            sizes = [self.options.heads, self.options.kv_heads, self.options.kv_heads]
            projected = self.packed(x).view(batch, length, sum(sizes), self.width).split(sizes, 2)
        else:
            projected = [layer(x).view(batch, length, -1, self.width) for layer in (self.query, self.key, self.value)]
        query, key, value = projected
        if cos is not None and sin is not None:
            query, key = (rotate(part, (cos, sin), is_fused=self.options.fused) for part in (query, key))
        if not self.options.grouped:
            groups = query.shape[2] // key.shape[2]
            key, value = (_repeated(part, groups) for part in (key, value))
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=key.shape[1] != query.shape[1]
        )
        return self.out(attended.transpose(1, 2).reshape(batch, length, -1))


def _repeated(heads: Tensor, groups: int) -> Tensor:
    batch, length, count, width = heads.shape
    return heads[:, :, :, None].expand(-1, -1, -1, groups, -1).reshape(batch, length, count * groups, width)


class MLP(nn.Module):
    """A gated MLP, or one with GELU."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        gated = options.family == LLAMA
        self.gate = linear(options, "gate", options.hidden, options.ffn, bias=False) if gated else None
        self.up = linear(options, "up", options.hidden, options.ffn, bias=not gated)
        self.down = linear(options, "down", options.ffn, options.hidden, bias=not gated)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x)))
        gate, up = self.gate(x), self.up(x)
        return self.down(fused.SwiGLU.apply(gate, up) if self.options.fused else F.silu(gate) * up)


class Block(nn.Module):
    """Attention and an MLP, one after the other or side by side."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self.attention_norm, self.mlp_norm = norm(options), None if options.shared_norm else norm(options)
        self.attention, self.mlp = Attention(options), MLP(options)

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        normed = self.attention_norm(x)
        attended = self.attention(normed, cos, sin)
        if self.options.family == NEOX:
            return x + attended + self.mlp(normed if self.mlp_norm is None else self.mlp_norm(x))
        x = x + attended
        return x + self.mlp(self.mlp_norm(x))


def norm(options: Options) -> nn.Module:
    """Return the norm of a family."""
    return RMSNorm(options.hidden, is_fused=options.fused) if options.family == LLAMA else nn.LayerNorm(options.hidden)


class Decoder(nn.Module):
    """Predict every next token; with `parts` the logits come in so many parts of the sequence."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self.embedding = nn.Embedding(options.vocab, options.hidden)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.positions = nn.Embedding(options.seq, options.hidden) if options.family == MPT else None
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = norm(options)
        self.head = nn.Linear(options.hidden, options.vocab, bias=False)
        if options.tied:
            self.head.weight = self.embedding.weight
        if options.lora_rank:
            for name, param in self.named_parameters():
                param.requires_grad_("lora" in name)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor | list[Tensor]:
        hidden = self.embedding(tokens)
        cos = sin = None
        if self.positions is None:
            rotary = 0.25 if self.options.family == NEOX else 1.0
            cos, sin = rotation_of(positions, int(rotary * self.options.hidden / self.options.heads))
        else:
            hidden = hidden + self.positions(positions)
        for block in self.blocks:
            hidden = block(hidden, cos, sin)
        hidden = self.norm(hidden)
        if self.options.parts == 1:
            return self.head(hidden)
        return [self.head(part) for part in hidden.chunk(self.options.parts, 1)]


def recompute(blocks: nn.ModuleList, options: Options) -> None:
    """Recompute blocks in the backward pass: all of them, or what is neither attention nor every second product."""
    contexts: dict[str, Any] = {}
    if options.recompute == "selective":
        # A compiler does not keep the output of the last product, which no backward pass needs.
        products = len([layer for layer in blocks[0].modules() if isinstance(layer, nn.Linear)])
        contexts["context_fn"] = partial(_selective, products if options.fused else 0)
    for block in blocks:
        block.forward = Recomputed(block.forward, contexts, offload=options.offload)


class Recomputed:
    """A forward pass that is run again in the backward pass."""

    def __init__(self, forward: Any, contexts: dict[str, Any], *, offload: bool) -> None:
        self.forward, self.contexts, self.offload = forward, contexts, offload

    def __call__(self, *args: Any) -> Any:
        with torch.autograd.graph.save_on_cpu() if self.offload else nullcontext():
            return checkpoint(self.forward, *args, use_reentrant=False, preserve_rng_state=False, **self.contexts)


_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_KEPT = (
    *_PRODUCTS,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
)


def _selective(last: int) -> Any:
    seen: Counter[bool] = Counter()

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen[context.is_recompute] += operation in _PRODUCTS
        number = seen[context.is_recompute]
        kept = operation in _KEPT and not (operation in _PRODUCTS and (number % 2 == 0 or number == last))
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
