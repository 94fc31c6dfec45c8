"""One process, one device: the model is not wrapped."""

from __future__ import annotations

from torch import nn

from .base import Capabilities, Strategy


class SingleProcess(Strategy):
    """Train on this process alone."""

    capabilities = Capabilities()

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model itself."""
        return model
