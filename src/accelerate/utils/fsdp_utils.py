"""Published path of what other libraries call on sharded models, and overwrite."""

from ..checkpoint.parts.fsdp_files import (
    _get_model_state_dict,
    _set_model_state_dict,
    load_fsdp_model,
    load_fsdp_optimizer,
    merge_fsdp_weights,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from ..parallel.mesh.fsdp2 import (
    disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading,
    fsdp2_apply_ac,
    fsdp2_canonicalize_names,
    fsdp2_load_full_state_dict,
    fsdp2_prepare_model,
    fsdp2_switch_optimizer_parameters,
    get_fsdp2_grad_scaler,
    get_parameters_from_modules,
)
from ..parallel.modules.unwrapping import is_peft_model
from ..parallel.modules.wrapping import fsdp2_prepare_auto_wrap_policy
from .facade import overwritable

__all__ = [
    "_get_model_state_dict",
    "_set_model_state_dict",
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
    "is_peft_model",
    "load_fsdp_model",
    "load_fsdp_optimizer",
    "merge_fsdp_weights",
    "save_fsdp_model",
    "save_fsdp_optimizer",
]

overwritable(
    __name__,
    {
        "_get_model_state_dict": (".checkpoint.parts.fsdp_files",),
        "_set_model_state_dict": (".checkpoint.parts.fsdp_files",),
        "fsdp2_prepare_auto_wrap_policy": (".parallel.modules.wrapping",),
    },
)
