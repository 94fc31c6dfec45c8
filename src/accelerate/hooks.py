"""Published path of the hooks around a module's forward pass; they live in `accelerate.inference.offload.hooks`."""

from .inference.offload.hooks import (
    AlignDevicesHook,
    CpuOffload,
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    UserCpuOffloadHook,
    _accelerate_added_attributes,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from .inference.offload.weights import PrefixedDataset
from .inference.tensors import named_module_tensors, set_module_tensor_to_device
from .runtime.collectives.nested import find_device, send_to_device

__all__ = [
    "AlignDevicesHook",
    "CpuOffload",
    "LayerwiseCastingHook",
    "ModelHook",
    "PrefixedDataset",
    "SequentialHook",
    "UserCpuOffloadHook",
    "_accelerate_added_attributes",
    "add_hook_to_module",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "find_device",
    "named_module_tensors",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
    "send_to_device",
    "set_module_tensor_to_device",
]
