"""Small models whose stages exchange more than hidden states, or keep state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH, WORDS = 8, 32


class Block(nn.Module):
    """A residual layer whose share is weighed by a mask or a number."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, hidden: Tensor, weight: Any = 1.0) -> Tensor:
        """Return the next hidden state."""
        return torch.as_tensor(hidden + self.down(torch.tanh(self.up(hidden))) * weight)


class Net(nn.Module):
    """Embeddings, four blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        return self.through(self.embed(tokens))

    def through(self, hidden: Tensor, *weight: Any) -> Tensor:
        """Return the logits of hidden states."""
        for block in self.blocks:
            hidden = block(hidden, *weight)
        return torch.as_tensor(self.head(hidden))


class FrontWithMask(nn.Embedding):
    """An embedding that also returns a mask, which follows from the tokens alone."""

    def forward(self, tokens: Tensor) -> Any:
        """Return hidden states and a mask."""
        return super().forward(tokens), (tokens > 9).unsqueeze(-1).float()


class FrontWithNumber(nn.Embedding):
    """An embedding that also returns a Python number, which follows from the tokens alone."""

    def forward(self, tokens: Tensor) -> Any:
        """Return hidden states and the part of the tokens that is large."""
        return super().forward(tokens), int((tokens > 9).sum()) / tokens.numel()


class MaskNet(Net):
    """A model whose first part makes what all blocks take."""

    def __init__(self, front: type[nn.Embedding] = FrontWithMask) -> None:
        super().__init__()
        weight = self.embed.weight
        self.embed = front(WORDS, WIDTH)
        self.embed.weight = weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        return self.through(*self.embed(tokens))


class OptionalMaskNet(Net):
    """A model that leaves the mask out where it hides nothing, and passes it to the blocks before the hidden states."""

    class Block(Block):
        """A block that takes the mask first."""

        def forward(self, mask: Tensor | None, hidden: Tensor) -> Tensor:  # type: ignore[override]
            """Return the next hidden state."""
            return super().forward(hidden, 1.0 if mask is None else mask)

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.__class__ = OptionalMaskNet.Block

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        mask = None if bool((tokens > 9).any()) else (tokens > 4).unsqueeze(-1).float()
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(mask, hidden)
        return torch.as_tensor(self.head(hidden))


class NoisyNet(Net):
    """A model that draws a mask at random, and applies it in front of the blocks and behind them."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        mask = (torch.rand(tokens.shape) > 0.5).float().unsqueeze(-1)
        hidden = self.embed(tokens) * mask
        for block in self.blocks:
            hidden = block(hidden)
        return torch.as_tensor(self.head(hidden * mask))


class RandomNet(nn.Module):
    """Four blocks that each add a random mask, which is drawn once and passed from block to block."""

    class Block(nn.Linear):
        """Add the mask, and return it."""

        def forward(self, call: Any) -> Any:
            """Return hidden states and the mask."""
            hidden, mask = call
            return super().forward(hidden) + mask, mask

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RandomNet.Block(1, 1, bias=False) for _ in range(4))
        for block in self.blocks:
            nn.init.ones_(block.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return how often each token was masked."""
        call: Any = (torch.zeros(*tokens.shape, 1), (torch.rand(tokens.shape) > 0.5).float().unsqueeze(-1))
        for block in self.blocks:
            call = block(call)
        return torch.as_tensor(call[0])


class CountingNet(Net):
    """A model that counts the samples it has seen, in a buffer and in a plain number."""

    def __init__(self, kind: str = "assigned") -> None:
        super().__init__()
        self.kind = kind
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits, a little larger with every sample."""
        self.calls += 1
        if self.kind == "in place":
            self.seen += len(tokens)
        if self.kind == "assigned":
            self.seen = self.seen + len(tokens)
        hidden = self.embed(tokens) * (1 + self.seen / 100)
        if self.kind == "of activations":
            self.seen += hidden.detach().sum()
        logits = self.through(hidden)
        if self.kind == "at the end":
            self.seen = self.seen + len(tokens)
        return logits
