"""Published path of what other libraries call on sharded models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.fsdp_files import (
    load_fsdp_model,
    load_fsdp_optimizer,
    merge_fsdp_weights,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from ..config.environment import FSDP_VARIABLES, export
from ..config.sharding import FullyShardedDataParallelPlugin
from ..parallel.wrapping import ignored_parameters, units_of

_WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.")


def enable_fsdp_ram_efficient_loading() -> None:
    """Let libraries that load weights do so on the first process only."""
    export({FSDP_VARIABLES["cpu_ram_efficient_loading"]: "True"})


def disable_fsdp_ram_efficient_loading() -> None:
    """Let libraries that load weights do so on every process."""
    export({FSDP_VARIABLES["cpu_ram_efficient_loading"]: "False"})


def fsdp2_prepare_model(accelerator: Any, model: nn.Module) -> nn.Module:
    """Shard a model in place."""
    prepared: nn.Module = accelerator.strategy.wrap(model)
    return prepared


def fsdp2_prepare_auto_wrap_policy(
    fsdp2_plugin: FullyShardedDataParallelPlugin, model: nn.Module
) -> Callable[[nn.Module], bool]:
    """Return a function that tells which modules of a model become units."""
    chosen = {id(unit) for unit in units_of(model, fsdp2_plugin)}
    return lambda module: id(module) in chosen


def fsdp2_apply_ac(accelerator: Any, model: nn.Module) -> nn.Module:
    """Let the units of a model recompute their activations."""
    accelerator.strategy.recompute(units_of(model, accelerator.state.fsdp_plugin))
    return model


def fsdp2_canonicalize_names(named_params: dict[str, Any]) -> dict[str, Any]:
    """Return parameters under the names of the user's own model."""
    return {_without_wrappers(name): value for name, value in named_params.items()}


def _without_wrappers(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device
) -> set[nn.Parameter]:
    """Return the parameters of modules, or of those whose names match a pattern, moved to a device."""
    params = ignored_parameters(model, FullyShardedDataParallelPlugin(ignored_modules=modules))
    for param in params:
        param.data = param.data.to(device)
    return params


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Return a loss scaler: torch's own knows sharded gradients."""
    return torch.amp.GradScaler(**kwargs)


def fsdp2_load_full_state_dict(
    accelerator: Any, model: nn.Module, full_sd: dict[str, Any], cpu_offload: bool = False
) -> None:
    """Give a sharded model the state that the first process has."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=cpu_offload)
    set_model_state_dict(model, full_sd if accelerator.is_main_process else {}, options=options)


def fsdp2_switch_optimizer_parameters(optimizer: torch.optim.Optimizer, mapping: dict[int, Tensor]) -> None:
    """Point an optimizer at new parameters, given by the addresses of the old ones."""
    for group in optimizer.param_groups:
        group["params"] = [mapping.get(param.data_ptr(), param) for param in group["params"]]


def _get_model_state_dict(model: nn.Module, adapter_only: bool = False, sd_options: Any = None) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return get_model_state_dict(model, options=sd_options)


def _set_model_state_dict(
    model: nn.Module, state_dict: dict[str, Any], adapter_only: bool = False, sd_options: Any = None
) -> Any:
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    return set_model_state_dict(model, state_dict, options=sd_options)


__all__ = [
    "disable_fsdp_ram_efficient_loading",
    "enable_fsdp_ram_efficient_loading",
    "fsdp2_apply_ac",
    "fsdp2_canonicalize_names",
    "fsdp2_load_full_state_dict",
    "fsdp2_prepare_auto_wrap_policy",
    "fsdp2_prepare_model",
    "fsdp2_switch_optimizer_parameters",
    "get_fsdp2_grad_scaler",
    "get_parameters_from_modules",
    "load_fsdp_model",
    "load_fsdp_optimizer",
    "merge_fsdp_weights",
    "save_fsdp_model",
    "save_fsdp_optimizer",
]
