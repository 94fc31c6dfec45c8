"""The published module `accelerate.utils.other`."""

from meshwright.checkpoint.formats.codec import load as load
from meshwright.checkpoint.formats.saving import (
    clean_state_dict_for_safetensors as clean_state_dict_for_safetensors,
    save as save,
)
from meshwright.inference.planning.sizes import convert_bytes as convert_bytes
from meshwright.parallel.compilation import (
    compile_regions as compile_regions,
    compile_regions_deepspeed as compile_regions_deepspeed,
    compile_regions_fsdp2 as compile_regions_fsdp2,
    has_compiled_regions as has_compiled_regions,
    has_repeated_blocks as has_repeated_blocks,
    is_repeated_blocks as is_repeated_blocks,
    model_has_dtensor as model_has_dtensor,
)
from meshwright.parallel.modules.spread import get_model_tp_size as get_model_tp_size
from meshwright.parallel.modules.unwrapping import (
    extract_model_from_parallel as extract_model_from_parallel,
    is_compiled_module as is_compiled_module,
)
from meshwright.published import publish as _publish
from meshwright.runtime.collectives.nested import merge_dicts as merge_dicts
from meshwright.runtime.devices.hardware import check_os_kernel as check_os_kernel
from meshwright.runtime.group.network import (
    get_free_port as get_free_port,
    is_port_in_use as is_port_in_use,
)
from meshwright.runtime.group.runtime import wait_for_everyone as wait_for_everyone
from meshwright.runtime.modules import (
    get_module_children_bottom_up as get_module_children_bottom_up,
    get_pretty_name as get_pretty_name,
    recursive_getattr as recursive_getattr,
)

from ..commands.config.default import write_basic_config as write_basic_config

_publish(__name__)
