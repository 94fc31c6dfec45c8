"""fp8 with NVIDIA's TransformerEngine, where it is installed: its layers replace torch's, inside its own autocast.

A converted layer keeps the parameters of the layer it replaces, so optimizers, names and checkpoints do not change.
Nobody has run this on a GPU yet: it is written for the package's published interface.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..config.enums import FP8BackendType
from ..config.plugins.fp8 import Fp8Settings, TERecipeKwargs
from ..config.plugins.handlers import AutocastKwargs, KwargsHandler
from ..errors import UnsupportedSettingError
from .amp import AmpPrecision

_DIVISOR = 16
"""fp8 matrix multiplication needs dimensions that are multiples of this."""


class TransformerEnginePrecision(AmpPrecision):
    """Compute in fp8 in TransformerEngine's layers, under bf16 autocast; parameters and outputs stay fp32."""

    fp8_backend = FP8BackendType.TE

    def __init__(self, device: torch.device, autocast: AutocastKwargs, settings: Fp8Settings) -> None:
        _package("transformer_engine.pytorch", f" ({settings.backend_origin})")  # fail early
        super().__init__(torch.bfloat16, device, autocast)
        self.recipe = settings.te_recipe

    def convert(self, model: nn.Module, to_fp8: Callable[..., None]) -> None:
        """Replace layers by TransformerEngine's, in place, and compute in fp8 inside the model's forward pass."""
        if not has_transformer_engine_layers(model):
            convert_model(model)
        apply_fp8_autowrap(model, self.recipe)


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Return whether any layer of a model is TransformerEngine's."""
    engine = _engine()
    kinds = (engine.LayerNorm, engine.Linear, engine.TransformerLayer)
    return any(isinstance(module, kinds) for module in model.modules())


def convert_model(
    model: nn.Module, to_transformer_engine: bool = True, _convert_linear: bool = True, _convert_ln: bool = True
) -> None:
    """Replace linear layers and layer norms of a model by TransformerEngine's, or back, in place.

    Linear layers whose sizes do not divide by 16 stay as they are.
    """
    engine = _engine()
    linear, norm = (nn.Linear, nn.LayerNorm) if to_transformer_engine else (engine.Linear, engine.LayerNorm)
    makers = engine if to_transformer_engine else nn
    for name, child in list(model.named_children()):
        if _convert_linear and isinstance(child, linear):
            if not to_transformer_engine or not any(size % _DIVISOR for size in child.weight.shape):
                setattr(model, name, _replaced(child, _linear_like(child, makers)))
        elif _convert_ln and isinstance(child, norm):
            setattr(model, name, _replaced(child, _norm_like(child, makers)))
        else:
            convert_model(child, to_transformer_engine, _convert_linear, _convert_ln)


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """Return a forward method that computes in fp8: in training, and with `use_during_eval` in evaluation too."""
    engine = _engine()

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with engine.fp8_autocast(enabled=use_during_eval or self.training, fp8_recipe=fp8_recipe):
            return model_forward(*args, **kwargs)

    forward.__wrapped__ = model_forward  # type: ignore[attr-defined]
    return forward


def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: KwargsHandler | None) -> nn.Module:
    """Let the forward pass of a model compute in fp8, by a `TERecipeKwargs`."""
    recipe = fp8_recipe_handler if isinstance(fp8_recipe_handler, TERecipeKwargs) else TERecipeKwargs()
    in_evaluation = bool(recipe.use_autocast_during_eval)
    model.forward = MethodType(contextual_fp8_autocast(model.forward, _recipe_of(recipe), in_evaluation), model)
    return model


def _recipe_of(recipe: TERecipeKwargs) -> Any:
    """Return TransformerEngine's own recipe."""
    recipes = _package("transformer_engine.common.recipe")
    if recipe.use_mxfp8_block_scaling:
        return recipes.MXFP8BlockScaling()
    names = ("margin", "interval", "fp8_format", "amax_history_len", "amax_compute_algo", "override_linear_precision")
    options = {name: value for name in names if (value := getattr(recipe, name)) is not None}
    if "fp8_format" in options:
        options["fp8_format"] = getattr(recipes.Format, options["fp8_format"])
    return recipes.DelayedScaling(**options)


def _replaced(old: nn.Module, new: Any) -> Any:
    """Give a layer the parameters and the mode of the one that it replaces."""
    for name, param in old.named_parameters(recurse=False):
        setattr(new, name, param)
    return new.train(old.training)


def _linear_like(layer: Any, makers: Any) -> Any:
    bias = layer.bias is not None and layer.bias.numel() > 0
    return makers.Linear(layer.in_features, layer.out_features, bias=bias)


def _norm_like(layer: Any, makers: Any) -> Any:
    return makers.LayerNorm(tuple(layer.weight.shape), eps=layer.eps)


def _engine() -> Any:
    return _package("transformer_engine.pytorch")


def _package(name: str, origin: str = "") -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedSettingError(
            f"fp8 through TransformerEngine{origin}",
            f"the package cannot be imported here ({error}).",
            "Run `pip install transformer_engine[pytorch]`; or use --fp8_backend ao, with `pip install torchao`.",
        ) from error
