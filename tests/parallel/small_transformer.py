"""A language model so small that every parallelism strategy can be compared with one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, WIDTH, HEADS, LENGTH = 32, 16, 4, 8
TP_PLAN = {
    "blocks.*.query": "colwise",
    "blocks.*.key": "colwise",
    "blocks.*.value": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}


class Block(nn.Module):
    """Attention and an MLP, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next hidden state; the number of heads here follows from the width of the layers here."""
        normed = self.norm1(x)
        heads = [
            layer(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Embeddings, blocks and a head, which may be the embeddings again."""

    def __init__(self, layers: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the logits."""
        places = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def model(**options: Any) -> Transformer:
    """Make the same model every time."""
    torch.manual_seed(0)
    return Transformer(**options)


def loader(batch_size: int, samples: int = 512) -> DataLoader[Any]:
    """Make the same random text every time."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, VOCABULARY, (samples, LENGTH + 1), generator=generator)
    return DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=batch_size)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss per token."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
