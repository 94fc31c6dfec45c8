"""Full precision: nothing is cast or scaled. The base class of other formats."""

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
    """Compute in the parameters' own dtype."""

    scaler: torch.amp.GradScaler | None = None
    """The loss scaler, if the format needs one."""
    fp8_backend = FP8BackendType.NO
    """The fp8 backend, if there is one."""

    def convert(self, model: nn.Module, to_fp8: Callable[..., None]) -> None:
        """Replace layers by ones that compute in this format, in place; parameters stay the same objects.

        `to_fp8` is the function that converts to fp8; other libraries replace it.
        """

    def wrap_forward(self, model: nn.Module) -> None:
        """Make the model's forward pass compute in this format, in place."""

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[object]:
        """Return a context in which operations compute in this format."""
        return nullcontext()

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to call `backward` on."""
        return loss
