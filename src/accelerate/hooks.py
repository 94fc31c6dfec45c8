"""The published module `accelerate.hooks`."""

from meshwright.inference.offload.hooks import (
    AlignDevicesHook as AlignDevicesHook,
    CpuOffload as CpuOffload,
    LayerwiseCastingHook as LayerwiseCastingHook,
    ModelHook as ModelHook,
    SequentialHook as SequentialHook,
    UserCpuOffloadHook as UserCpuOffloadHook,
    _accelerate_added_attributes as _accelerate_added_attributes,
    add_hook_to_module as add_hook_to_module,
    attach_align_device_hook as attach_align_device_hook,
    attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks,
    attach_execution_device_hook as attach_execution_device_hook,
    remove_hook_from_module as remove_hook_from_module,
    remove_hook_from_submodules as remove_hook_from_submodules,
)
from meshwright.published import publish as _publish

from .utils.modeling import (
    named_module_tensors as named_module_tensors,
    set_module_tensor_to_device as set_module_tensor_to_device,
)
from .utils.offload import PrefixedDataset as PrefixedDataset
from .utils.operations import (
    find_device as find_device,
    send_to_device as send_to_device,
)

_publish(__name__)
