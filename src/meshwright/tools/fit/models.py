"""What a remembered batch size depends on: the models and optimizers that a function prepares."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from torch import nn


def facts_of_models(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> list[str]:
    """Return one line per object: its class, how many parameters it has, and a hash of their shapes and dtypes."""
    return [_facts_of(model) for model in models] + [type(optimizer).__name__ for optimizer in optimizers]


def _facts_of(model: nn.Module) -> str:
    params = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    number = sum(param.numel() for param in model.parameters())
    return f"{type(model).__name__}, {number:,} parameters, {hashlib.sha256(repr(params).encode()).hexdigest()[:12]}"
