"""Small models of ours in the shapes of Llama, GPT-2, BERT, T5 and Mixtral. Each returns its loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, VOCABULARY, EXPERTS = 64, 4, 128, 4


class Attention(nn.Module):
    """Attention to the own sequence or to another one."""

    def __init__(self, *, kv_heads: int = HEADS, bias: bool = True, causal: bool = True) -> None:
        super().__init__()
        self.size, self.causal = WIDTH // HEADS, causal
        self.query, self.out = nn.Linear(WIDTH, WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH, bias=bias)
        self.key, self.value = (nn.Linear(WIDTH, kv_heads * self.size, bias=bias) for _ in range(2))

    def forward(self, x: Tensor, other: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        source = x if other is None else other
        heads = [layer(part).unflatten(-1, (-1, self.size)).transpose(1, 2)
                 for layer, part in ((self.query, x), (self.key, source), (self.value, source))]  # fmt: skip
        attended = F.scaled_dot_product_attention(
            *heads, attn_mask=bias, is_causal=self.causal and other is None and bias is None, enable_gqa=True
        )
        return self.out(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Gated(nn.Module):
    """The feed-forward network of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Two of four feed-forward networks for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Gated() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            weight = (weights * (chosen == number)).sum(-1, keepdim=True)
            result = result + weight * expert(x)
        return result


def plain() -> nn.Module:
    """Return the feed-forward network of GPT-2, BERT and T5."""
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Block(nn.Module):
    """Norms before attention and the feed-forward network, as in all but BERT."""

    def __init__(
        self, attention: Attention, feed_forward: nn.Module, *, rms: bool = False, crosses: bool = False
    ) -> None:
        super().__init__()
        norm = nn.RMSNorm if rms else nn.LayerNorm
        self.norms = nn.ModuleList(norm(WIDTH) for _ in range(2 + crosses))
        self.attention, self.feed_forward = attention, feed_forward
        self.cross = Attention(causal=False) if crosses else None

    def forward(self, x: Tensor, other: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norms[0](x), None, bias)
        if self.cross is not None:
            x = x + self.cross(self.norms[2](x), other)
        return x + self.feed_forward(self.norms[1](x))  # type: ignore[no-any-return]


class BertBlock(Block):
    """Norms after them."""

    def forward(self, x: Tensor, other: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        x = self.norms[0](x + self.attention(x, None, bias))
        return self.norms[1](x + self.feed_forward(x))  # type: ignore[no-any-return]


class Model(nn.Module):
    """A stack of blocks and a head."""

    def __init__(self, blocks: list[Block], *, tied: bool = False, masks: bool = False) -> None:
        super().__init__()
        self.embedding, self.masks = nn.Embedding(VOCABULARY, WIDTH), masks
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        bias = (input_ids > 1)[:, None, None].float() if self.masks else None
        for block in self.blocks:
            x = block(x, None, bias)
        return F.cross_entropy(self.head(x).flatten(0, 1), input_ids.flatten())


class EncoderDecoder(nn.Module):
    """Two stacks; the first encodes."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.encoder = nn.ModuleList(Block(Attention(causal=False), plain(), rms=True) for _ in range(layers))
        self.decoder = nn.ModuleList(Block(Attention(), plain(), rms=True, crosses=True) for _ in range(layers))

    def forward(self, input_ids: Tensor) -> Tensor:
        encoded = decoded = self.embedding(input_ids)
        for block in self.encoder:
            encoded = block(encoded)
        for block in self.decoder:
            decoded = block(decoded, encoded)
        return F.cross_entropy(self.head(decoded).flatten(0, 1), input_ids.flatten())


def model_of(family: str, layers: int) -> nn.Module:
    """Return a model."""
    if family == "t5":
        return EncoderDecoder(layers)
    if family == "bert":
        return Model([BertBlock(Attention(causal=False), plain()) for _ in range(layers)], masks=True)
    if family == "gpt2":
        return Model([Block(Attention(), plain()) for _ in range(layers)], tied=True)
    experts = family == "mixtral"
    return Model(
        [Block(Attention(kv_heads=2, bias=False), Experts() if experts else Gated(), rms=True) for _ in range(layers)]
    )
