"""The published package `accelerate.utils`."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from meshwright.published import publish as _publish

from .ao import *  # noqa: F403
from .constants import *  # noqa: F403
from .dataclasses import *  # noqa: F403
from .environment import *  # noqa: F403
from .imports import *  # noqa: F403
from .launch import *  # noqa: F403
from .megatron_lm import *  # noqa: F403
from .memory import *  # noqa: F403
from .operations import *  # noqa: F403
from .random import *  # noqa: F403
from .torch_xla import install_xla as install_xla
from .tqdm import tqdm as tqdm
from .versions import *  # noqa: F403

if TYPE_CHECKING:
    from .bnb import (
        has_4bit_bnb_layers as has_4bit_bnb_layers,
        load_and_quantize_model as load_and_quantize_model,
    )
    from .deepspeed import (
        DeepSpeedEngineWrapper as DeepSpeedEngineWrapper,
        DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper,
        DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper,
        DummyOptim as DummyOptim,
        DummyScheduler as DummyScheduler,
        HfDeepSpeedConfig as HfDeepSpeedConfig,
        get_active_deepspeed_plugin as get_active_deepspeed_plugin,
        map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed,
    )
    from .fsdp_utils import (
        disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
        enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
        fsdp2_apply_ac as fsdp2_apply_ac,
        fsdp2_canonicalize_names as fsdp2_canonicalize_names,
        fsdp2_load_full_state_dict as fsdp2_load_full_state_dict,
        fsdp2_prepare_model as fsdp2_prepare_model,
        fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters,
        get_fsdp2_grad_scaler as get_fsdp2_grad_scaler,
        load_fsdp_model as load_fsdp_model,
        load_fsdp_optimizer as load_fsdp_optimizer,
        merge_fsdp_weights as merge_fsdp_weights,
        save_fsdp_model as save_fsdp_model,
        save_fsdp_optimizer as save_fsdp_optimizer,
    )
    from .modeling import (
        align_module_device as align_module_device,
        calculate_maximum_sizes as calculate_maximum_sizes,
        check_device_map as check_device_map,
        check_device_same as check_device_same,
        check_tied_parameters_in_config as check_tied_parameters_in_config,
        check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
        clean_device_map as clean_device_map,
        compute_module_sizes as compute_module_sizes,
        compute_module_total_buffer_size as compute_module_total_buffer_size,
        convert_file_size_to_int as convert_file_size_to_int,
        dtype_byte_size as dtype_byte_size,
        fallback_allocate as fallback_allocate,
        find_tied_parameters as find_tied_parameters,
        get_balanced_memory as get_balanced_memory,
        get_grad_scaler as get_grad_scaler,
        get_max_layer_size as get_max_layer_size,
        get_max_memory as get_max_memory,
        get_mixed_precision_context_manager as get_mixed_precision_context_manager,
        get_module_leaves as get_module_leaves,
        get_module_size_with_ties as get_module_size_with_ties,
        get_non_persistent_buffers as get_non_persistent_buffers,
        get_state_dict_from_offload as get_state_dict_from_offload,
        get_state_dict_offloaded_model as get_state_dict_offloaded_model,
        has_offloaded_params as has_offloaded_params,
        id_tensor_storage as id_tensor_storage,
        infer_auto_device_map as infer_auto_device_map,
        is_peft_model as is_peft_model,
        load_checkpoint_in_model as load_checkpoint_in_model,
        load_offloaded_weights as load_offloaded_weights,
        load_state_dict as load_state_dict,
        logger as logger,
        named_module_tensors as named_module_tensors,
        retie_parameters as retie_parameters,
        set_module_tensor_to_device as set_module_tensor_to_device,
    )
    from .offload import (
        OffloadedWeightsLoader as OffloadedWeightsLoader,
        PrefixedDataset as PrefixedDataset,
        extract_submodules_state_dict as extract_submodules_state_dict,
        load_offloaded_weight as load_offloaded_weight,
        offload_state_dict as offload_state_dict,
        offload_weight as offload_weight,
        save_offload_index as save_offload_index,
    )
    from .other import (
        check_os_kernel as check_os_kernel,
        clean_state_dict_for_safetensors as clean_state_dict_for_safetensors,
        compile_regions as compile_regions,
        compile_regions_deepspeed as compile_regions_deepspeed,
        compile_regions_fsdp2 as compile_regions_fsdp2,
        convert_bytes as convert_bytes,
        extract_model_from_parallel as extract_model_from_parallel,
        get_free_port as get_free_port,
        get_model_tp_size as get_model_tp_size,
        get_module_children_bottom_up as get_module_children_bottom_up,
        get_pretty_name as get_pretty_name,
        has_compiled_regions as has_compiled_regions,
        has_repeated_blocks as has_repeated_blocks,
        is_compiled_module as is_compiled_module,
        is_port_in_use as is_port_in_use,
        is_repeated_blocks as is_repeated_blocks,
        load as load,
        merge_dicts as merge_dicts,
        model_has_dtensor as model_has_dtensor,
        recursive_getattr as recursive_getattr,
        save as save,
        wait_for_everyone as wait_for_everyone,
        write_basic_config as write_basic_config,
    )
    from .transformer_engine import (
        apply_fp8_autowrap as apply_fp8_autowrap,
        contextual_fp8_autocast as contextual_fp8_autocast,
        convert_model as convert_model,
        has_transformer_engine_layers as has_transformer_engine_layers,
    )

# Imported when they are used: together they take longer than the rest.
_LAZY = {
    "DeepSpeedEngineWrapper": "deepspeed",
    "DeepSpeedOptimizerWrapper": "deepspeed",
    "DeepSpeedSchedulerWrapper": "deepspeed",
    "DummyOptim": "deepspeed",
    "DummyScheduler": "deepspeed",
    "HfDeepSpeedConfig": "deepspeed",
    "OffloadedWeightsLoader": "offload",
    "PrefixedDataset": "offload",
    "align_module_device": "modeling",
    "apply_fp8_autowrap": "transformer_engine",
    "calculate_maximum_sizes": "modeling",
    "check_device_map": "modeling",
    "check_device_same": "modeling",
    "check_os_kernel": "other",
    "check_tied_parameters_in_config": "modeling",
    "check_tied_parameters_on_same_device": "modeling",
    "clean_device_map": "modeling",
    "clean_state_dict_for_safetensors": "other",
    "compile_regions": "other",
    "compile_regions_deepspeed": "other",
    "compile_regions_fsdp2": "other",
    "compute_module_sizes": "modeling",
    "compute_module_total_buffer_size": "modeling",
    "contextual_fp8_autocast": "transformer_engine",
    "convert_bytes": "other",
    "convert_file_size_to_int": "modeling",
    "convert_model": "transformer_engine",
    "disable_fsdp_ram_efficient_loading": "fsdp_utils",
    "dtype_byte_size": "modeling",
    "enable_fsdp_ram_efficient_loading": "fsdp_utils",
    "extract_model_from_parallel": "other",
    "extract_submodules_state_dict": "offload",
    "fallback_allocate": "modeling",
    "find_tied_parameters": "modeling",
    "fsdp2_apply_ac": "fsdp_utils",
    "fsdp2_canonicalize_names": "fsdp_utils",
    "fsdp2_load_full_state_dict": "fsdp_utils",
    "fsdp2_prepare_model": "fsdp_utils",
    "fsdp2_switch_optimizer_parameters": "fsdp_utils",
    "get_active_deepspeed_plugin": "deepspeed",
    "get_balanced_memory": "modeling",
    "get_free_port": "other",
    "get_fsdp2_grad_scaler": "fsdp_utils",
    "get_grad_scaler": "modeling",
    "get_max_layer_size": "modeling",
    "get_max_memory": "modeling",
    "get_mixed_precision_context_manager": "modeling",
    "get_model_tp_size": "other",
    "get_module_children_bottom_up": "other",
    "get_module_leaves": "modeling",
    "get_module_size_with_ties": "modeling",
    "get_non_persistent_buffers": "modeling",
    "get_pretty_name": "other",
    "get_state_dict_from_offload": "modeling",
    "get_state_dict_offloaded_model": "modeling",
    "has_4bit_bnb_layers": "bnb",
    "has_compiled_regions": "other",
    "has_offloaded_params": "modeling",
    "has_repeated_blocks": "other",
    "has_transformer_engine_layers": "transformer_engine",
    "id_tensor_storage": "modeling",
    "infer_auto_device_map": "modeling",
    "is_compiled_module": "other",
    "is_peft_model": "modeling",
    "is_port_in_use": "other",
    "is_repeated_blocks": "other",
    "load": "other",
    "load_and_quantize_model": "bnb",
    "load_checkpoint_in_model": "modeling",
    "load_fsdp_model": "fsdp_utils",
    "load_fsdp_optimizer": "fsdp_utils",
    "load_offloaded_weight": "offload",
    "load_offloaded_weights": "modeling",
    "load_state_dict": "modeling",
    "logger": "modeling",
    "map_pytorch_optim_to_deepspeed": "deepspeed",
    "merge_dicts": "other",
    "merge_fsdp_weights": "fsdp_utils",
    "model_has_dtensor": "other",
    "named_module_tensors": "modeling",
    "offload_state_dict": "offload",
    "offload_weight": "offload",
    "recursive_getattr": "other",
    "retie_parameters": "modeling",
    "save": "other",
    "save_fsdp_model": "fsdp_utils",
    "save_fsdp_optimizer": "fsdp_utils",
    "save_offload_index": "offload",
    "set_module_tensor_to_device": "modeling",
    "wait_for_everyone": "other",
    "write_basic_config": "other",
}
_MODULES = sorted({*_LAZY.values()})

__all__ = [name for name in globals() if not name.startswith("_") and name not in ("TYPE_CHECKING", "Any")] + [*_LAZY]

_publish(__name__)


def __getattr__(name: str) -> Any:
    """Import a name, or a module, when it is used (PEP 562)."""
    if name in _MODULES:
        return _import_module(f".{name}", __name__)
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(f".{_LAZY[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_MODULES})
