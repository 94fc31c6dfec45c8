"""A stand-in for NVIDIA's TransformerEngine, which needs CUDA: the published names, computed by torch."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
from torch import nn

AUTOCASTS: list[tuple[bool, Any]] = []
"""The arguments of every `fp8_autocast` that was entered."""


class Linear(nn.Linear):
    """`transformer_engine.pytorch.Linear`, with the arguments that are used."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, params_dtype: Any = None) -> None:
        super().__init__(in_features, out_features, bias=bias, dtype=params_dtype)


class LayerNorm(nn.LayerNorm):
    """`transformer_engine.pytorch.LayerNorm`, with the arguments that are used."""

    def __init__(self, hidden_size: Any, eps: float = 1e-5, params_dtype: Any = None) -> None:
        super().__init__(hidden_size, eps=eps, dtype=params_dtype)


class TransformerLayer(nn.Module):
    """`transformer_engine.pytorch.TransformerLayer`, which is only recognised."""


@contextmanager
def fp8_autocast(enabled: bool = True, fp8_recipe: Any = None, **kwargs: Any) -> Iterator[None]:
    """Note the arguments."""
    AUTOCASTS.append((enabled, fp8_recipe))
    yield


class Format(enum.Enum):
    """`transformer_engine.common.recipe.Format`."""

    E4M3 = 1
    E5M2 = 2
    HYBRID = 3


@dataclass
class DelayedScaling:
    """`transformer_engine.common.recipe.DelayedScaling`."""

    margin: int = 0
    interval: int = 1
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)


@dataclass
class MXFP8BlockScaling:
    """`transformer_engine.common.recipe.MXFP8BlockScaling`."""

    margin: int = 0


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the stand-in importable as the package."""
    names = {
        "transformer_engine": (),
        "transformer_engine.pytorch": (Linear, LayerNorm, TransformerLayer, fp8_autocast),
        "transformer_engine.common": (),
        "transformer_engine.common.recipe": (Format, DelayedScaling, MXFP8BlockScaling),
    }
    for name, contents in names.items():
        module = ModuleType(name)
        for each in contents:
            setattr(module, each.__name__, each)
        monkeypatch.setitem(sys.modules, name, module)
    AUTOCASTS.clear()
