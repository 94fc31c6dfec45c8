"""Switch dropout off while a mesh is compared with one process: their random numbers are not the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import functional

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_ATTENTION = "scaled_dot_product_attention"


@contextmanager
def without_dropout(note: Callable[[Tensor], None]) -> Iterator[None]:
    """Replace dropout by the identity inside the context; `note` gets the input of each that would have been random."""
    attend = getattr(functional, _ATTENTION)

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if training and p > 0:
            note(input)
        return input

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        if dropout_p > 0:
            note(query)
        return attend(query, key, value, attn_mask, 0.0, *args, **kwargs)

    plain = {name: getattr(functional, name) for name in (*_DROPOUTS, _ATTENTION)}
    for name in plain:
        setattr(functional, name, attention if name == _ATTENTION else dropout)
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(functional, name, function)
