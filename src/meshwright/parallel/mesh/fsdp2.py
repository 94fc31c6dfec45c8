"""FSDP2 functions that other libraries call and replace: see [Note: overwriting] in `published.py`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...config.environment import FSDP_VARIABLES, export
from ...config.plugins.sharding import FullyShardedDataParallelPlugin
from ..modules.unwrapping import own_name
from ..modules.wrapping import ignored_modules, parameters_in


def enable_fsdp_ram_efficient_loading() -> None:
    """Make libraries load weights on the first process only."""
    export({FSDP_VARIABLES["cpu_ram_efficient_loading"]: "True"})


def disable_fsdp_ram_efficient_loading() -> None:
    """Make libraries load weights on every process."""
    export({FSDP_VARIABLES["cpu_ram_efficient_loading"]: "False"})


def fsdp2_prepare_model(accelerator: Any, model: nn.Module) -> nn.Module:
    """Shard a model in place."""
    sharded: nn.Module = accelerator.strategy.shard(model)
    return sharded


def fsdp2_apply_ac(accelerator: Any, model: nn.Module) -> nn.Module:
    """Apply activation checkpointing to the units of a model."""
    recomputing: nn.Module = accelerator.strategy.recompute(model)
    return recomputing


def fsdp2_canonicalize_names(named_params: dict[str, Any]) -> dict[str, Any]:
    """Return parameters under their names in the unwrapped model."""
    return {own_name(name): value for name, value in named_params.items()}


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device
) -> set[nn.Parameter]:
    """Return the parameters of modules, or of those whose names match a pattern, moved to a device."""
    params = parameters_in(ignored_modules(model, FullyShardedDataParallelPlugin(ignored_modules=modules)))
    for param in params:
        param.data = param.data.to(device)
    return set(params)


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Return torch's `GradScaler`, which supports sharded gradients."""
    return torch.amp.GradScaler(**kwargs)


def fsdp2_load_full_state_dict(
    accelerator: Any, model: nn.Module, full_sd: dict[str, Any], cpu_offload: bool = False
) -> None:
    """Load the state dict of the first process into a sharded model."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=cpu_offload)
    set_model_state_dict(model, full_sd if accelerator.is_main_process else {}, options=options)


def fsdp2_switch_optimizer_parameters(optimizer: torch.optim.Optimizer, mapping: dict[int, Tensor]) -> None:
    """Point an optimizer at new parameters, given by the addresses of the old ones."""
    for group in optimizer.param_groups:
        group["params"] = [mapping.get(param.data_ptr(), param) for param in group["params"]]
