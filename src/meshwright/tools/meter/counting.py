"""Count the samples and tokens of a batch, from shapes and from masks on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from ...runtime.devices.device import is_cpu

Count = tuple[float, float, float]
"""Samples, tokens, and elements of the leading tensor, to which the work of a batch is proportional."""
_LEADING = ("input_ids", "pixel_values", "input_features", "input_values", "inputs_embeds", "inputs", "x")


class UnevenRound(Protocol):
    """A round in which some ranks have fewer real samples than others."""

    counts: list[int]
    rows: int


class BatchCounter:
    """Count batches of one form, whose leading tensor is looked for once."""

    def __init__(self, tokens: Callable[[Any], int] | None) -> None:
        self.work = 0.0
        """The elements of all batches so far."""
        self._tokens = tokens
        self._has_tokens = False
        self._form: type | None = None
        self._path: tuple[Any, ...] = ()
        """The keys that lead to the leading tensor of a batch of this form."""
        self._plain_form: Any = None
        """The form of batches whose leading tensor is one of their values and has no tokens: the usual case."""
        self._plain_key: Any = None

    def __call__(self, batch: Any, partial: UnevenRound | None) -> Count:
        """Return the count of a batch; samples that only fill up a last round are left out."""
        counted: Count | None = None
        if partial is None and type(batch) is self._plain_form:
            try:
                leading = batch[self._plain_key]
                counted = leading.shape[0], 0, leading.numel()
            except (LookupError, AttributeError):
                pass  # the same class with other parts
        if counted is None:
            counted = self._count(batch, partial)
        self.work += counted[2]
        return counted

    def _count(self, batch: Any, partial: UnevenRound | None) -> Count:
        leading = self._leading(batch)
        if leading is None:
            return 1.0, 0.0 if self._tokens is None else self._tokens(batch), 1.0
        shape = leading.shape
        rows = shape[0] if shape else 1
        tokens = 0 if not self._has_tokens else self._tokens(batch) if self._tokens else _tokens(batch, leading)
        if partial is None:
            return rows, tokens, leading.numel()
        # Every rank counts its part of the real samples of all: the sum over ranks is what counts.
        real = sum(partial.counts) / (len(partial.counts) * max(partial.rows, 1))
        return rows * real, tokens * real, leading.numel()

    def _leading(self, batch: Any) -> Tensor | None:
        if type(batch) is self._form:
            found: Any = batch
            try:
                for key in self._path:
                    found = found[key]
                if isinstance(found, Tensor):
                    return found
            except (LookupError, TypeError):
                pass  # the same class with other parts
        path, leading = _find(batch)
        self._form, self._path = (None, ()) if path is None else (type(batch), path)
        self._has_tokens = self._tokens is not None or path == ("input_ids",)
        is_plain = path is not None and len(path) == 1 and not self._has_tokens
        self._plain_form, self._plain_key = (type(batch), self._path[0]) if is_plain else (None, None)
        return leading


def _find(batch: Any) -> tuple[tuple[Any, ...] | None, Tensor | None]:
    """Return the leading tensor of a batch and the keys that lead to it."""
    if isinstance(batch, Tensor):
        return (), batch
    if isinstance(batch, Mapping):
        keys: list[Any] = [key for key in _LEADING if key in batch]
        keys += [key for key in batch if key not in keys]
    elif isinstance(batch, (tuple, list)):
        keys = list(range(len(batch)))
    else:
        return None, None
    for key in keys:
        path, leading = _find(batch[key])
        if path is not None:
            return (key, *path), leading
    return None, None


def _tokens(batch: Any, leading: Tensor) -> int:
    """Return the tokens of a batch with `input_ids`, without padding where a mask on the host shows it."""
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == leading.shape and is_cpu(mask.device):
        return int(mask.count_nonzero())
    return int(leading.numel())
