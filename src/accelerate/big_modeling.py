"""The published module `accelerate.big_modeling`."""

from meshwright.inference.dispatch import (
    attach_layerwise_casting_hooks as attach_layerwise_casting_hooks,
    cpu_offload as cpu_offload,
    cpu_offload_with_hook as cpu_offload_with_hook,
    disk_offload as disk_offload,
    dispatch_model as dispatch_model,
)
from meshwright.inference.empty import (
    init_empty_weights as init_empty_weights,
    init_on_device as init_on_device,
)
from meshwright.inference.loading import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
from meshwright.published import publish as _publish

from .hooks import (
    AlignDevicesHook as AlignDevicesHook,
    CpuOffload as CpuOffload,
    LayerwiseCastingHook as LayerwiseCastingHook,
    UserCpuOffloadHook as UserCpuOffloadHook,
    add_hook_to_module as add_hook_to_module,
    attach_align_device_hook as attach_align_device_hook,
    attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks,
)
from .utils.modeling import (
    check_device_map as check_device_map,
    find_tied_parameters as find_tied_parameters,
    get_max_memory as get_max_memory,
    infer_auto_device_map as infer_auto_device_map,
    load_checkpoint_in_model as load_checkpoint_in_model,
    retie_parameters as retie_parameters,
)
from .utils.offload import (
    OffloadedWeightsLoader as OffloadedWeightsLoader,
    extract_submodules_state_dict as extract_submodules_state_dict,
    offload_state_dict as offload_state_dict,
)

_publish(__name__)
