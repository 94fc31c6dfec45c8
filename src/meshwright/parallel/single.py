"""One process, one device: the model is not wrapped."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from .base import Capabilities, Strategy
from .modules.spread import Layout


class SingleProcess(Strategy):
    """Train on this process alone."""

    capabilities = Capabilities()

    def fits(self, layout: Layout, model: nn.Module) -> bool:
        """Return True: with one process there is nothing to cut or to average."""
        return True

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model itself."""
        return model

    def objection_to_early_steps(self, params: Sequence[Tensor]) -> None:
        """Return None: nothing is added to a gradient after autograd has accumulated it."""
