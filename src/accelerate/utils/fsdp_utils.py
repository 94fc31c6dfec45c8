"""The published module `accelerate.utils.fsdp_utils`."""

from meshwright.checkpoint.parts.fsdp_files import (
    _get_model_state_dict as _get_model_state_dict,
    _set_model_state_dict as _set_model_state_dict,
    load_fsdp_model as load_fsdp_model,
    load_fsdp_optimizer as load_fsdp_optimizer,
    merge_fsdp_weights as merge_fsdp_weights,
    save_fsdp_model as save_fsdp_model,
    save_fsdp_optimizer as save_fsdp_optimizer,
)
from meshwright.parallel.mesh.fsdp2 import (
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
    fsdp2_apply_ac as fsdp2_apply_ac,
    fsdp2_canonicalize_names as fsdp2_canonicalize_names,
    fsdp2_load_full_state_dict as fsdp2_load_full_state_dict,
    fsdp2_prepare_model as fsdp2_prepare_model,
    fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters,
    get_fsdp2_grad_scaler as get_fsdp2_grad_scaler,
    get_parameters_from_modules as get_parameters_from_modules,
)
from meshwright.parallel.modules.wrapping import fsdp2_prepare_auto_wrap_policy as fsdp2_prepare_auto_wrap_policy
from meshwright.published import publish as _publish

from .modeling import is_peft_model as is_peft_model

_publish(__name__)
