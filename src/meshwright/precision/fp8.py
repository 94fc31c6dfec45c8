"""fp8 with torchao: linear layers multiply in fp8, everything else computes in bf16.

torchao is imported when the first model is converted, not by importing this module. A converted layer keeps the
parameters of the layer it replaces, so optimizers, names and checkpoints do not change.
"""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from ..config.enums import FP8BackendType
from ..config.plugins.fp8 import AORecipeKwargs, Filter, Fp8Settings
from ..config.plugins.handlers import AutocastKwargs
from ..errors import UnsupportedSettingError
from ..errors.callers import warn
from ..runtime.devices.device import supports_fp8
from ..runtime.group.runtime import rank_of_this_process
from .amp import AmpPrecision

logger = logging.getLogger(__name__)

_DIVISOR = 16
"""fp8 matrix multiplication needs dimensions that are multiples of this."""


class Fp8Precision(AmpPrecision):
    """Multiply in fp8 in converted layers, under bf16 autocast; parameters and outputs stay fp32."""

    fp8_backend = FP8BackendType.AO

    def __init__(self, device: torch.device, autocast: AutocastKwargs, settings: Fp8Settings) -> None:
        settings.refuse_other_engines()
        super().__init__(torch.bfloat16, device, autocast)
        self.filter = settings.recipe.module_filter_func
        self.config = _config_of(settings.recipe, device)
        if self.config.emulate:
            _log_emulation(device.type)

    def convert(self, model: nn.Module, to_fp8: Callable[..., None]) -> None:
        """Convert linear layers to fp8 in place, and log which."""
        if has_ao_layers(model):
            _log_on_main(f"{type(model).__name__} has fp8 layers already, and stays as it is.")
            return
        chosen, left = _choice(model, self.filter)
        to_fp8(model, config=self.config, module_filter_func=self.filter)
        converted = [name for name in (*chosen, *left) if isinstance(model.get_submodule(name), _fp8_linear())]
        others = dict.fromkeys(chosen, "what was put in the place of convert_model_to_fp8_ao leaves it out") | left
        _report(model, converted, {name: reason for name, reason in others.items() if name not in converted})


def convert_model_to_fp8_ao(model: nn.Module, config: Any = None, module_filter_func: Filter | None = None) -> None:
    """Convert the linear layers of a model to torchao's fp8 layers, in place.

    Without a filter the first and the last linear layer are not converted, nor those whose sizes do not divide by 16.
    """
    _swap(
        model, _choice(model, module_filter_func)[0], config if config is not None else _torchao().Float8LinearConfig()
    )


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the names of the first and the last linear layer, in the order of definition."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: Iterable[str | None]) -> bool:
    """Return whether a module may compute in fp8: it is not one of the named, and its sizes divide by 16."""
    return fqn not in layers_to_filter and not (isinstance(module, nn.Linear) and _odd_sizes(module))


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Return whether the layer of this name in a model may compute in fp8: it is neither the first nor the last."""
    return filter_linear_layers(module, fqn, layers_to_filter=find_first_last_linear_layers(module))


def has_ao_layers(model: nn.Module) -> bool:
    """Return whether any layer of a model computes in fp8 by torchao."""
    if "torchao.float8" not in sys.modules:  # then there cannot be any
        return False
    return any(isinstance(module, _fp8_linear()) for module in model.modules())


# --- which layers ---------------------------------------------------------------------------------------------------


def _choice(model: nn.Module, accepts: Filter | None) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Return the linear layers to convert by name, and why the others are not."""
    first, last = find_first_last_linear_layers(model)
    rules = partial(_reason_by_default, first=first, last=last) if accepts is None else partial(_reason_by, accepts)
    chosen: dict[str, nn.Linear] = {}
    left: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            reason = _reason_by_type(name, module) or rules(name, module)
            if reason is None:
                chosen[name] = module
            else:
                left[name] = reason
    return chosen, left


def _reason_by_type(name: str, module: nn.Linear) -> str | None:
    if name == "":
        return "it is the model itself, which cannot be exchanged"
    if type(module) is not nn.Linear:
        return f"it is a {type(module).__name__}, whose own ways would be lost"
    if "forward" in vars(module):
        return "its forward was replaced"
    return None


def _reason_by_default(name: str, module: nn.Linear, first: str | None, last: str | None) -> str | None:
    if name in (first, last):
        return f"it is the {'first' if name == first else 'last'} linear layer"
    return f"its sizes do not divide by {_DIVISOR}" if _odd_sizes(module) else None


def _reason_by(accepts: Filter, name: str, module: nn.Linear) -> str | None:
    return None if accepts(module, name) else "module_filter_func leaves it out"


def _odd_sizes(module: nn.Linear) -> bool:
    return module.in_features % _DIVISOR != 0 or module.out_features % _DIVISOR != 0


def _report(model: nn.Module, chosen: list[str], left: dict[str, str]) -> None:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, reason in left.items():
        by_reason[reason].append(name or type(model).__name__)
    rest = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items()) or "none"
    model_name = type(model).__name__
    if chosen:
        _log_on_main(
            f"{len(chosen)} linear layers of {model_name} compute in fp8: {', '.join(chosen)}. Left in bf16: {rest}."
        )
    elif rank_of_this_process() == 0:
        warn(f'mixed_precision="fp8" converts no layer of {model_name}, which runs in bf16: {rest}.')


# --- torchao --------------------------------------------------------------------------------------------------------


def _swap(model: nn.Module, layers: dict[str, nn.Linear], config: Any) -> None:
    if not layers:
        return
    _torchao().convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in layers)
    for name, old in layers.items():
        # torchao keeps the parameters; copy hooks, flags and other attributes.
        attributes = {key: value for key, value in vars(old).items() if key != "_parameters"}
        vars(model.get_submodule(name)).update(attributes)


def _config_of(recipe: AORecipeKwargs, device: torch.device) -> Any:
    """Return torchao's configuration, as this device supports it."""
    config = recipe.config if recipe.config is not None else _torchao().Float8LinearConfig()
    overrides = {
        "pad_inner_dim": recipe.pad_inner_dim,
        "enable_fsdp_float8_all_gather": recipe.enable_fsdp_float8_all_gather,
    }
    config = replace(config, **{name: value for name, value in overrides.items() if value is not None})
    if config.enable_fsdp_float8_all_gather:
        config = replace(config, enable_fsdp_float8_all_gather=False)
        if rank_of_this_process() == 0:
            warn(
                "enable_fsdp_float8_all_gather has no effect: this version gathers shards in their own format, "
                "because fp8 ones would make parameters of a class that checkpoints do not know.",
            )
    return config if supports_fp8(device) else replace(config, emulate=True)


def _torchao() -> Any:
    try:
        import torchao.float8
    except ImportError as error:
        raise UnsupportedSettingError(
            'mixed_precision="fp8"',
            f"it computes through torchao, which cannot be imported here ({error}).",
            "Run `pip install torchao`, or use bf16.",
        ) from error
    return torchao.float8


def _fp8_linear() -> type[nn.Module]:
    from torchao.float8.float8_linear import Float8Linear

    kind: type[nn.Module] = Float8Linear
    return kind


@cache
def _log_emulation(kind: str) -> None:
    if rank_of_this_process() == 0:
        logger.warning(
            f"This {kind} has no fp8 arithmetic: torchao rounds to fp8 and computes in a wider format, which is slower."
        )


def _log_on_main(text: str) -> None:
    if rank_of_this_process() == 0:
        logger.info(text)
