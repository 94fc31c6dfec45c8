"""Published path of what concerns a model's weights: sizes, device maps, tensors moved one by one."""

import logging

from ..checkpoint.formats.saving import id_tensor_storage
from ..inference.loading import load_checkpoint_in_model, load_state_dict
from ..inference.offload.offloaded import (
    align_module_device,
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
    has_offloaded_params,
)
from ..inference.offload.weights import load_offloaded_weights
from ..inference.planning.device_map import (
    check_device_map,
    check_tied_parameters_on_same_device,
    clean_device_map,
    fallback_allocate,
    get_balanced_memory,
    get_max_memory,
    get_module_size_with_ties,
    infer_auto_device_map,
)
from ..inference.planning.sizes import (
    calculate_maximum_sizes,
    compute_module_sizes,
    compute_module_total_buffer_size,
    convert_file_size_to_int,
    dtype_byte_size,
    get_max_layer_size,
    get_module_leaves,
)
from ..inference.tensors import (
    check_device_same,
    check_tied_parameters_in_config,
    find_tied_parameters,
    get_non_persistent_buffers,
    named_module_tensors,
    retie_parameters,
    set_module_tensor_to_device,
)
from ..inference.tensors import proper_dtype as _get_proper_dtype
from ..parallel.modules.unwrapping import is_peft_model
from ..precision.amp import get_mixed_precision_context_manager
from ..precision.scaler import get_grad_scaler
from ..runtime.devices.device import clear_device_cache
from .facade import overwritable

logger = logging.getLogger(__name__)

__all__ = [
    "_get_proper_dtype",
    "align_module_device",
    "calculate_maximum_sizes",
    "check_device_map",
    "check_device_same",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "clean_device_map",
    "clear_device_cache",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "fallback_allocate",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_grad_scaler",
    "get_max_layer_size",
    "get_max_memory",
    "get_mixed_precision_context_manager",
    "get_module_leaves",
    "get_module_size_with_ties",
    "get_non_persistent_buffers",
    "get_state_dict_from_offload",
    "get_state_dict_offloaded_model",
    "has_offloaded_params",
    "id_tensor_storage",
    "infer_auto_device_map",
    "is_peft_model",
    "load_checkpoint_in_model",
    "load_offloaded_weights",
    "load_state_dict",
    "logger",
    "named_module_tensors",
    "retie_parameters",
    "set_module_tensor_to_device",
]

overwritable(__name__, {"clear_device_cache": (".inference.tensors", ".inference.offload.hooks")})
