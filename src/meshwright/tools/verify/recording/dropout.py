"""Switch dropout off while a mesh is compared with one process: their random numbers are not the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
}  # fmt: skip
_attention = torch._C._nn.scaled_dot_product_attention
_PROBABILITY_OF_ATTENTION = 4
"""The place of `dropout_p` among the arguments."""


class WithoutDropout(TorchFunctionMode):
    """Replace dropout by the identity; `note` gets the input of each that would have been random."""

    def __init__(self, note: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, or leave out its dropout."""
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
            if given.get("p", 0.5) > 0 and given.get("training", given.get("train", True)):
                self._note(given["input"])
            return given["input"]
        if func is _attention:
            args, kwargs = self._without_probability(args, kwargs)
        return func(*args, **kwargs)

    def _without_probability(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        at = _PROBABILITY_OF_ATTENTION
        probability = args[at] if len(args) > at else kwargs.get("dropout_p", 0.0)
        if probability > 0:
            self._note(args[0] if args else kwargs["query"])
        kwargs = {name: value for name, value in kwargs.items() if name != "dropout_p"}
        return ((*args[:at], 0.0, *args[at + 1 :]) if len(args) > at else args), kwargs
