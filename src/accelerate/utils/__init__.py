"""The published package `accelerate.utils`."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from meshwright.published import publish as _publish

from .ao import *  # noqa: F403
from .constants import *  # noqa: F403
from .dataclasses import *  # noqa: F403
from .environment import *  # noqa: F403
from .imports import *  # noqa: F403
from .launch import *  # noqa: F403
from .megatron_lm import *  # noqa: F403
from .memory import *  # noqa: F403
from .modeling import *  # noqa: F403
from .offload import *  # noqa: F403
from .operations import *  # noqa: F403
from .other import *  # noqa: F403
from .random import *  # noqa: F403
from .torch_xla import install_xla as install_xla
from .tqdm import tqdm as tqdm
from .versions import *  # noqa: F403

if TYPE_CHECKING:
    from .bnb import (
        has_4bit_bnb_layers as has_4bit_bnb_layers,
        load_and_quantize_model as load_and_quantize_model,
    )
    from .deepspeed import (
        DeepSpeedEngineWrapper as DeepSpeedEngineWrapper,
        DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper,
        DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper,
        DummyOptim as DummyOptim,
        DummyScheduler as DummyScheduler,
        HfDeepSpeedConfig as HfDeepSpeedConfig,
        get_active_deepspeed_plugin as get_active_deepspeed_plugin,
        map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed,
    )
    from .fsdp_utils import (
        disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
        enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
        fsdp2_apply_ac as fsdp2_apply_ac,
        fsdp2_canonicalize_names as fsdp2_canonicalize_names,
        fsdp2_load_full_state_dict as fsdp2_load_full_state_dict,
        fsdp2_prepare_model as fsdp2_prepare_model,
        fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters,
        get_fsdp2_grad_scaler as get_fsdp2_grad_scaler,
        load_fsdp_model as load_fsdp_model,
        load_fsdp_optimizer as load_fsdp_optimizer,
        merge_fsdp_weights as merge_fsdp_weights,
        save_fsdp_model as save_fsdp_model,
        save_fsdp_optimizer as save_fsdp_optimizer,
    )
    from .transformer_engine import (
        apply_fp8_autowrap as apply_fp8_autowrap,
        contextual_fp8_autocast as contextual_fp8_autocast,
        convert_model as convert_model,
        has_transformer_engine_layers as has_transformer_engine_layers,
    )

# Imported when they are used, because torch's checkpoint engine, or the quantizing packages, take long to import.
_LAZY = {
    "DeepSpeedEngineWrapper": "deepspeed",
    "DeepSpeedOptimizerWrapper": "deepspeed",
    "DeepSpeedSchedulerWrapper": "deepspeed",
    "DummyOptim": "deepspeed",
    "DummyScheduler": "deepspeed",
    "HfDeepSpeedConfig": "deepspeed",
    "apply_fp8_autowrap": "transformer_engine",
    "contextual_fp8_autocast": "transformer_engine",
    "convert_model": "transformer_engine",
    "disable_fsdp_ram_efficient_loading": "fsdp_utils",
    "enable_fsdp_ram_efficient_loading": "fsdp_utils",
    "fsdp2_apply_ac": "fsdp_utils",
    "fsdp2_canonicalize_names": "fsdp_utils",
    "fsdp2_load_full_state_dict": "fsdp_utils",
    "fsdp2_prepare_model": "fsdp_utils",
    "fsdp2_switch_optimizer_parameters": "fsdp_utils",
    "get_active_deepspeed_plugin": "deepspeed",
    "get_fsdp2_grad_scaler": "fsdp_utils",
    "has_4bit_bnb_layers": "bnb",
    "has_transformer_engine_layers": "transformer_engine",
    "load_and_quantize_model": "bnb",
    "load_fsdp_model": "fsdp_utils",
    "load_fsdp_optimizer": "fsdp_utils",
    "map_pytorch_optim_to_deepspeed": "deepspeed",
    "merge_fsdp_weights": "fsdp_utils",
    "save_fsdp_model": "fsdp_utils",
    "save_fsdp_optimizer": "fsdp_utils",
}

__all__ = [name for name in globals() if not name.startswith("_") and name not in ("TYPE_CHECKING", "Any")] + [*_LAZY]

_publish(__name__)


def __getattr__(name: str) -> Any:
    """Import a name when it is used (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(f".{_LAZY[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
