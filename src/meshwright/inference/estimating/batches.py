"""What a model is called with, and what its outputs are trained by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...runtime.collectives.nested import leaves


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """The arguments of a call of the model."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any) -> ModelArguments:
        """Convert a tensor to one argument, a tuple or a list to arguments, and a mapping to keywords."""
        if isinstance(value, ModelArguments):
            return value
        if isinstance(value, Mapping):
            return cls(kwargs=dict(value))
        return cls(args=tuple(value) if isinstance(value, (tuple, list)) else (value,))


Loss = Callable[[Any, ModelArguments], Tensor]


def default_loss(outputs: Any, batch: ModelArguments) -> Tensor:
    """Return the loss that a model returned, or else a scalar that depends on all of its outputs."""
    own = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(own, Tensor):
        return own
    tensors = [leaf for leaf in leaves(outputs) if isinstance(leaf, Tensor)]
    numbers = [tensor.float().mean() for tensor in tensors if tensor.is_floating_point()]
    if not numbers:
        raise ValueError("the model returned no tensor of floating-point numbers")
    return torch.stack(numbers).sum()
