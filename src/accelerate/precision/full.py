"""Full precision: nothing is cast, nothing is scaled. The contract that other formats refine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..config.enums import FP8BackendType

if TYPE_CHECKING:
    import torch

    from ..config.plugins.handlers import AutocastKwargs


class FullPrecision:
    """Compute in the parameters' own number format."""

    scaler: torch.amp.GradScaler | None = None
    """Scales the loss, where the format needs it."""
    fp8_backend = FP8BackendType.NO
    """Who computes in fp8, where anybody does."""

    def convert(self, model: nn.Module, to_fp8: Callable[..., None]) -> None:
        """Exchange layers for ones that compute in this format, in place; their parameters stay the same objects.

        `to_fp8` is the function that does it for fp8, which other libraries overwrite.
        """

    def wrap_forward(self, model: nn.Module) -> None:
        """Make the model's forward pass compute in this format, in place."""

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[object]:
        """Return a context in which operations compute in this format."""
        return nullcontext()

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to call `backward` on."""
        return loss
