"""Mixed precision: one class per number format."""

from __future__ import annotations

import torch

from ..config.enums import FP8BackendType, PrecisionType
from ..config.plugins.fp8 import Fp8Settings
from ..config.plugins.handlers import AutocastKwargs, GradScalerKwargs
from .amp import AmpPrecision
from .full import FullPrecision


def precision_for(
    name: str, device: torch.device, autocast: AutocastKwargs, scaler: GradScalerKwargs | None, fp8: Fp8Settings
) -> FullPrecision:
    """Return the precision for a format name: the only branch on it. `scaler` is None if an engine scales losses."""
    if name == PrecisionType.FP8:
        if fp8.backend == FP8BackendType.TE:
            from .transformer_engine import TransformerEnginePrecision

            return TransformerEnginePrecision(device, autocast, fp8)
        from .fp8 import Fp8Precision  # here: few runs need it

        return Fp8Precision(device, autocast, fp8)
    fp8.warn_of_other_format(name)
    if name == PrecisionType.FP16:
        return AmpPrecision(torch.float16, device, autocast, scaler)
    if name == PrecisionType.BF16:
        return AmpPrecision(torch.bfloat16, device, autocast)
    return FullPrecision()


__all__ = ["AmpPrecision", "FullPrecision", "precision_for"]
