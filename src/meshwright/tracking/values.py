"""Convert configs and values of any shape to plain data."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import logging
import os
from collections.abc import Callable, Collection, Mapping
from datetime import date
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

logger = logging.getLogger(__name__)

LARGEST_LIST = 64
"""A tensor in a config with more elements is described instead of written out."""


def plain(value: Any, _ancestors: tuple[int, ...] = ()) -> Any:
    """Convert a value of any shape to numbers, text, lists and dictionaries, which JSON can hold.

    A container that holds itself ends in "...".
    """
    for kind, convert in _LEAVES:
        if isinstance(value, kind):
            return convert(value)
    if id(value) in _ancestors:
        return "..."
    ancestors = (*_ancestors, id(value))
    value = _with_fields_as_dict(value)
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item, ancestors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, ancestors) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item, ancestors) for item in value), key=str)
    return getattr(value, "__qualname__", None) or str(value)


def _with_fields_as_dict(value: Any) -> Any:
    """Return the fields of a namespace or a dataclass instance as a dictionary, and any other value as it is."""
    if isinstance(value, argparse.Namespace):
        return vars(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value


def _plain_array(array: Tensor | np.ndarray[Any, Any]) -> Any:
    size = array.numel() if isinstance(array, Tensor) else array.size
    if size == 1:
        return array.item()
    if size <= LARGEST_LIST:
        return array.tolist()
    return f"{type(array).__name__} of shape {tuple(array.shape)}, {array.dtype}"


_LEAVES: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (enum.Enum, lambda value: plain(value.value)),  # before text and numbers, which a member can be too
    ((type(None), bool, int, float, str), lambda value: value),
    (os.PathLike, os.fspath),
    (np.generic, lambda value: plain(value.item())),
    ((Tensor, np.ndarray), _plain_array),
    (date, lambda value: value.isoformat()),
)
"""The types that hold no other values, with their conversion; the first that fits counts."""


def flat(config: Any, separator: str = ".") -> dict[str, bool | int | float | str | None]:
    """Flatten a config to one level: `{"model": {"depth": 2}}` becomes `{"model.depth": 2}`, lists become text."""
    result: dict[str, Any] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                walk(item, f"{name}{separator}{key}" if name else key)
        elif isinstance(value, Collection) and not isinstance(value, str):
            result[name] = str(value)
        else:
            result[name] = value

    if config:
        walk(plain(config), "")
    return result


def is_number(value: Any) -> bool:
    """Tell whether a logged value is a number."""
    return isinstance(value, (int, float, np.number))


@cache
def warn_dropped(tracker: str, name: str, kind: str) -> None:
    """Warn, once for each name, that a tracker cannot store a value of this type."""
    logger.warning("The tracker %r cannot store %r, a %s: it is left out.", tracker, name, kind)


class StepCounter:
    """Number the records of a tracker that needs a step: the given one, or the one after the last."""

    def __init__(self) -> None:
        self.next = 0

    def __call__(self, step: int | None) -> int:
        """Return the step of this record."""
        step = self.next if step is None else step
        self.next = step + 1
        return step
