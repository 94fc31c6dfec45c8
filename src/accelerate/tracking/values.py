"""Configs and values of any shape, as plain data."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import logging
import os
from collections.abc import Collection, Mapping
from datetime import date
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

logger = logging.getLogger(__name__)

LARGEST_LIST = 64
"""A tensor in a config with more elements is described instead of written out."""


def plain(value: Any, _above: tuple[int, ...] = ()) -> Any:
    """Return numbers, text, lists and dictionaries that say what the value says; JSON can hold the result."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, (Tensor, np.ndarray)):
        return _plain_array(value)
    if isinstance(value, date):
        return value.isoformat()
    if id(value) in _above:
        return "..."  # it holds itself
    above = (*_above, id(value))
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item, above) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, above) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item, above) for item in value), key=str)
    return getattr(value, "__qualname__", None) or str(value)


def _plain_array(array: Tensor | np.ndarray[Any, Any]) -> Any:
    size = array.numel() if isinstance(array, Tensor) else array.size
    if size == 1:
        return array.item()
    if size <= LARGEST_LIST:
        return array.tolist()
    return f"{type(array).__name__} of shape {tuple(array.shape)}, {array.dtype}"


def flat(config: Any, separator: str = ".") -> dict[str, bool | int | float | str | None]:
    """Return one level of names: `{"model": {"depth": 2}}` becomes `{"model.depth": 2}`, lists become text."""
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
    """Tell whether a logged value is a point of a curve."""
    return isinstance(value, (int, float, np.number))


@cache
def say_left_out(tracker: str, name: str, kind: str) -> None:
    """Say, once for each name, that a tracker has no place for a value of this kind."""
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
