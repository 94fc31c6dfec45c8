"""The published module `accelerate.utils.modeling`."""

from logging import getLogger as _getLogger

from meshwright.checkpoint.formats.saving import id_tensor_storage as id_tensor_storage
from meshwright.inference.loading import (
    load_checkpoint_in_model as load_checkpoint_in_model,
    load_state_dict as load_state_dict,
)
from meshwright.inference.offload.offloaded import (
    align_module_device as align_module_device,
    get_state_dict_from_offload as get_state_dict_from_offload,
    get_state_dict_offloaded_model as get_state_dict_offloaded_model,
    has_offloaded_params as has_offloaded_params,
)
from meshwright.inference.offload.weights import load_offloaded_weights as load_offloaded_weights
from meshwright.inference.planning.device_map import (
    check_device_map as check_device_map,
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
    clean_device_map as clean_device_map,
    fallback_allocate as fallback_allocate,
    get_balanced_memory as get_balanced_memory,
    get_max_memory as get_max_memory,
    get_module_size_with_ties as get_module_size_with_ties,
    infer_auto_device_map as infer_auto_device_map,
)
from meshwright.inference.planning.sizes import (
    calculate_maximum_sizes as calculate_maximum_sizes,
    compute_module_sizes as compute_module_sizes,
    compute_module_total_buffer_size as compute_module_total_buffer_size,
    convert_file_size_to_int as convert_file_size_to_int,
    dtype_byte_size as dtype_byte_size,
    get_max_layer_size as get_max_layer_size,
    get_module_leaves as get_module_leaves,
)
from meshwright.inference.tensors import (
    check_device_same as check_device_same,
    check_tied_parameters_in_config as check_tied_parameters_in_config,
    find_tied_parameters as find_tied_parameters,
    get_non_persistent_buffers as get_non_persistent_buffers,
    named_module_tensors as named_module_tensors,
    proper_dtype as _get_proper_dtype,  # noqa: F401
    retie_parameters as retie_parameters,
    set_module_tensor_to_device as set_module_tensor_to_device,
)
from meshwright.parallel.modules.unwrapping import is_peft_model as is_peft_model
from meshwright.precision.amp import get_mixed_precision_context_manager as get_mixed_precision_context_manager
from meshwright.precision.scaler import get_grad_scaler as get_grad_scaler
from meshwright.published import publish as _publish

from .memory import clear_device_cache as clear_device_cache

logger = _getLogger(__name__)

_publish(__name__)
