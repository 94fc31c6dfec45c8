"""Published path of what runs models larger than memory; it lives in `accelerate.inference`."""

from .inference.dispatch import (
    attach_layerwise_casting_hooks,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
)
from .inference.empty import init_empty_weights, init_on_device
from .inference.loading import load_checkpoint_and_dispatch, load_checkpoint_in_model
from .inference.offload.hooks import (
    AlignDevicesHook,
    CpuOffload,
    LayerwiseCastingHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
)
from .inference.offload.weights import OffloadedWeightsLoader, extract_submodules_state_dict, offload_state_dict
from .inference.planning.device_map import check_device_map, get_max_memory, infer_auto_device_map
from .inference.tensors import find_tied_parameters, retie_parameters

__all__ = [
    "AlignDevicesHook",
    "CpuOffload",
    "LayerwiseCastingHook",
    "OffloadedWeightsLoader",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_layerwise_casting_hooks",
    "check_device_map",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "extract_submodules_state_dict",
    "find_tied_parameters",
    "get_max_memory",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "offload_state_dict",
    "retie_parameters",
]
