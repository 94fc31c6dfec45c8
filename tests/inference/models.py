"""Small models with what makes placing and offloading hard: ties, buffers, own tensors, shared modules."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

WIDTH = 32
NO_SPLIT = ["Residual"]


class Residual(nn.Module):
    """Adds its input, so it must not be split."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


class Scaled(nn.Module):
    """Has tensors of its own beside its children, of which one is no part of checkpoints."""

    shift: Tensor
    offset: Tensor

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("shift", torch.rand(WIDTH))
        self.register_buffer("offset", torch.rand(WIDTH), persistent=False)
        self.inner = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x * self.scale) + self.shift + self.offset
        return out + x


class Attention(nn.Module):
    """Uses a module that reads its child's weights without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.heads(x[None], x[None], x[None], need_weights=False)[0][0]
        return out


class Tied(nn.Module):
    """An embedding whose weight is the head's."""

    def __init__(self, tokens: int = 50, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, tokens, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.layers(self.embedding(tokens))))
        return out


def tied_model(seed: int = 0, **options: Any) -> Tied:
    torch.manual_seed(seed)
    return Tied(**options).eval()


LEAVES = ("linear", "linear", "norm", "batch norm", "activation", "attention", "tied", "shared")
Spec = Any


def specs() -> st.SearchStrategy[Spec]:
    """Draw a tree: names of leaves, and of nodes with their parts."""
    leaf = st.sampled_from(LEAVES)
    tree = st.recursive(
        leaf,
        lambda parts: st.tuples(
            st.sampled_from(["chain", "residual", "scaled"]), st.lists(parts, min_size=1, max_size=4)
        ),
        max_leaves=10,
    )
    return st.lists(tree, min_size=1, max_size=4)


def build(spec: list[Spec]) -> nn.Sequential:
    """Make the model of a tree; its values depend on the tree only."""
    torch.manual_seed(0)
    made: list[nn.Linear] = []

    def part(of: Spec) -> nn.Module:
        if isinstance(of, str):
            return leaf(of)
        kind, inner = of
        parts = [part(one) for one in inner]
        return {"chain": nn.Sequential, "residual": Residual, "scaled": Scaled}[kind](*parts)

    def leaf(kind: str) -> nn.Module:
        if kind == "shared" and made:
            return made[len(made) // 2]
        if kind == "norm":
            return nn.LayerNorm(WIDTH)
        if kind == "batch norm":
            return nn.BatchNorm1d(WIDTH)
        if kind == "activation":
            return nn.Tanh()
        if kind == "attention":
            return Attention()
        linear = nn.Linear(WIDTH, WIDTH)
        if kind == "tied" and made:
            linear.weight = made[0].weight
        made.append(linear)
        return linear

    return nn.Sequential(*(part(one) for one in spec)).eval()
