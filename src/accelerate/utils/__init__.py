"""The published utility names: façades that only hand names on. Nothing inside the library imports from here."""

from importlib import import_module
from typing import Any

from . import (
    ao,
    constants,
    dataclasses,
    environment,
    imports,
    launch,
    megatron_lm,
    memory,
    modeling,
    offload,
    operations,
    other,
    random,
    versions,
)
from .ao import *  # noqa: F403
from .constants import *  # noqa: F403
from .dataclasses import *  # noqa: F403
from .environment import *  # noqa: F403
from .facade import overwritable
from .imports import *  # noqa: F403
from .launch import *  # noqa: F403
from .megatron_lm import *  # noqa: F403
from .memory import *  # noqa: F403
from .modeling import *  # noqa: F403
from .offload import *  # noqa: F403
from .operations import *  # noqa: F403
from .other import *  # noqa: F403
from .random import *  # noqa: F403
from .tqdm import tqdm as tqdm
from .versions import *  # noqa: F403

__all__ = sorted(
    {
        *ao.__all__,
        *constants.__all__,
        *dataclasses.__all__,
        *environment.__all__,
        *imports.__all__,
        *launch.__all__,
        *megatron_lm.__all__,
        *memory.__all__,
        *modeling.__all__,
        *offload.__all__,
        *operations.__all__,
        *other.__all__,
        *random.__all__,
        "tqdm",
        *versions.__all__,
    }
)

# Loaded on first use, because torch's checkpoint engine, or the quantising packages, take long to import.
_HOME_OF = {
    "DeepSpeedEngineWrapper": "deepspeed",
    "apply_fp8_autowrap": "transformer_engine",
    "contextual_fp8_autocast": "transformer_engine",
    "convert_model": "transformer_engine",
    "has_transformer_engine_layers": "transformer_engine",
    "DeepSpeedOptimizerWrapper": "deepspeed",
    "DeepSpeedSchedulerWrapper": "deepspeed",
    "DummyOptim": "deepspeed",
    "DummyScheduler": "deepspeed",
    "HfDeepSpeedConfig": "deepspeed",
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
    "load_and_quantize_model": "bnb",
    "load_fsdp_model": "fsdp_utils",
    "load_fsdp_optimizer": "fsdp_utils",
    "map_pytorch_optim_to_deepspeed": "deepspeed",
    "merge_fsdp_weights": "fsdp_utils",
    "save_fsdp_model": "fsdp_utils",
    "save_fsdp_optimizer": "fsdp_utils",
}
__all__ += list(_HOME_OF)


def __getattr__(name: str) -> Any:
    """Load a name when it is first asked for (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


overwritable(__name__, dict.fromkeys(imports.__all__, (".runtime.devices.abilities", ".utils.imports")))
