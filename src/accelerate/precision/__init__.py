"""One object per number format of the forward and backward pass."""

from __future__ import annotations

import torch

from ..config.enums import PrecisionType
from ..config.plugins import AutocastKwargs, GradScalerKwargs
from .amp import AmpPrecision
from .full import FullPrecision


def precision_for(name: str, device: torch.device, autocast: AutocastKwargs, scaler: GradScalerKwargs) -> FullPrecision:
    """Return the object for a number format: the only branch on its name."""
    if name == PrecisionType.FP16:
        return AmpPrecision(torch.float16, device, autocast, scaler)
    if name == PrecisionType.BF16:
        return AmpPrecision(torch.bfloat16, device, autocast)
    return FullPrecision()


__all__ = ["AmpPrecision", "FullPrecision", "precision_for"]
