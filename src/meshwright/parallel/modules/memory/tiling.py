"""Compute modules that treat every token alone in tiles of a sequence, and each tile again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from ....errors import UnsupportedSettingError

_MAX_DIFFERENCE = 0.05
"""The relative difference between two tokens alone and together that rounding explains, in any dtype."""


def tile_mlp(model: nn.Module, module_classes: Sequence[str], *, num_tiles: int) -> nn.Module:
    """Compute the MLPs of a model in tiles of the sequence; return the model. Call it before `prepare`.

    Only the inputs and outputs of these modules are kept, and the activations between them exist for one tile at a
    time. Sums over tokens are added in another order: results are equal to rounding.

    Args:
        model: A model.
        module_classes: The names of the classes of modules that treat every token alone: `["LlamaMLP"]`. They take
            one tensor, whose last but one dimension is that of tokens, and return one.
        num_tiles: The number of tiles.
    """
    if num_tiles < 1:
        raise ValueError(f"num_tiles={num_tiles}: a sequence has one tile at least.")
    found = {id(part): part for part in model.modules() if type(part).__name__ in module_classes}
    inside = {id(part) for module in found.values() for part in module.modules() if part is not module}
    modules = [module for key, module in found.items() if key not in inside]
    if not modules:
        raise ValueError(f"{type(model).__name__} has no module of the classes {list(module_classes)}.")
    for module in modules:
        name = type(module).__name__
        if isinstance(module.forward, TiledForward):
            raise UnsupportedSettingError(f"tile_mlp({name})", "it is computed in tiles already.", "Call it once.")
        if any(isinstance(part, _BatchNorm) for part in module.modules()):
            raise UnsupportedSettingError(
                f"tile_mlp({name})", "its batch norm computes on all tokens at once.", "Name other modules."
            )
    for module in modules:
        module.forward = TiledForward(module, num_tiles)
    return model


class TiledForward:
    """A forward pass in tiles of the last but one dimension; in training each tile is recomputed."""

    def __init__(self, module: nn.Module, num_tiles: int) -> None:
        self.forward: Callable[..., Any] = module.forward
        self.num_tiles = num_tiles
        self._name = type(module).__name__
        self._module: Any = module
        self._is_checked = False

    def __call__(self, tokens: Tensor, *others: Any, **options: Any) -> Tensor:
        """Run the forward pass."""
        if others or options or not isinstance(tokens, Tensor) or tokens.dim() < 2:
            raise UnsupportedSettingError(
                f"tile_mlp({self._name})",
                "its forward pass was called with other arguments than one tensor of tokens.",
                "Name modules that take one tensor.",
            )
        if not self._is_checked and tokens.shape[-2] > 1:
            self._check(tokens.detach())
        tiles = tokens.chunk(self.num_tiles, -2)
        if torch.is_grad_enabled():
            return torch.cat([checkpoint(self.forward, tile, use_reentrant=False) for tile in tiles], -2)
        return torch.cat([self.forward(tile) for tile in tiles], -2)

    @torch.no_grad()
    def _check(self, tokens: Tensor) -> None:
        """Compute two tokens together and alone, once: a module that mixes tokens would give wrong values in tiles."""
        self._is_checked = True
        two = tokens[..., :2, :]
        modes = {part: part.training for part in self._module.modules()}
        self._module.eval()  # dropout would differ
        try:
            together = self.forward(two)
            alone = [self.forward(token) for token in two.chunk(2, -2)]
        finally:
            for part, training in modes.items():
                part.training = training
        if not isinstance(together, Tensor) or together.shape[:-1] != two.shape[:-1]:
            raise UnsupportedSettingError(
                f"tile_mlp({self._name})", "it does not return one vector per token.", "Name other modules."
            )
        difference = (together.float() - torch.cat(alone, -2).float()).norm()
        if difference > _MAX_DIFFERENCE * together.float().norm():
            raise UnsupportedSettingError(
                f"tile_mlp({self._name})",
                "the output of a token depends on other tokens, as in attention.",
                "Name modules that treat every token alone.",
            )
