"""Published path of what fits nowhere else."""

from ..checkpoint.formats.saving import clean_state_dict_for_safetensors, load, save
from ..commands.config.default import write_basic_config
from ..inference.planning.sizes import convert_bytes
from ..parallel.compilation import (
    compile_regions,
    compile_regions_deepspeed,
    compile_regions_fsdp2,
    has_compiled_regions,
    has_repeated_blocks,
    is_repeated_blocks,
    model_has_dtensor,
)
from ..parallel.mesh.matrices.stepping import step_full_tensors
from ..parallel.mesh.tensor.plans import get_model_tp_size
from ..parallel.modules.unwrapping import extract_model_from_parallel, is_compiled_module
from ..runtime.collectives.nested import merge_dicts
from ..runtime.devices.hardware import check_os_kernel
from ..runtime.group.network import get_free_port, is_port_in_use
from ..runtime.group.runtime import wait_for_everyone
from ..runtime.modules import get_module_children_bottom_up, get_pretty_name, recursive_getattr

__all__ = [
    "check_os_kernel",
    "clean_state_dict_for_safetensors",
    "compile_regions",
    "compile_regions_deepspeed",
    "compile_regions_fsdp2",
    "convert_bytes",
    "extract_model_from_parallel",
    "get_free_port",
    "get_model_tp_size",
    "get_module_children_bottom_up",
    "get_pretty_name",
    "has_compiled_regions",
    "has_repeated_blocks",
    "is_compiled_module",
    "is_port_in_use",
    "is_repeated_blocks",
    "load",
    "merge_dicts",
    "model_has_dtensor",
    "recursive_getattr",
    "save",
    "step_full_tensors",
    "wait_for_everyone",
    "write_basic_config",
]
