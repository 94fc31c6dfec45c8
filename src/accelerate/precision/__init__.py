"""One object per number format of the forward and backward pass."""

from __future__ import annotations

import torch

from ..config.enums import PrecisionType
from ..config.plugins.fp8 import Fp8Settings
from ..config.plugins.handlers import AutocastKwargs, GradScalerKwargs
from .amp import AmpPrecision
from .full import FullPrecision


def precision_for(
    name: str, device: torch.device, autocast: AutocastKwargs, scaler: GradScalerKwargs | None, fp8: Fp8Settings
) -> FullPrecision:
    """Return the object for a number format: the only branch on its name. Without a scaler somebody else scales."""
    if name == PrecisionType.FP8:
        from .fp8 import Fp8Precision  # here: few runs need it

        return Fp8Precision(device, autocast, fp8)
    fp8.warn_of_other_format(name)
    if name == PrecisionType.FP16:
        return AmpPrecision(torch.float16, device, autocast, scaler)
    if name == PrecisionType.BF16:
        return AmpPrecision(torch.bfloat16, device, autocast)
    return FullPrecision()


__all__ = ["AmpPrecision", "FullPrecision", "precision_for"]
