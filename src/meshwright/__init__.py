"""Five lines take a PyTorch training loop from one process to many.

The public names are imported on first use, so that importing one of them costs no more than it needs.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing and importlib would be most of what the import takes
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

_HOME_OF = {
    "AORecipeKwargs": "config.plugins.fp8",
    "AcceleratedOptimizer": "optimizer",
    "AcceleratedScheduler": "scheduler",
    "Accelerator": "accelerator",
    "AcceleratorState": "state",
    "AutocastKwargs": "config.plugins.handlers",
    "BatchSamplerShard": "data.order.sharding",
    "BnbQuantizationConfig": "config.plugins.quantization",
    "DDPCommunicationHookType": "config.enums",
    "DataLoaderConfiguration": "config.plugins.handlers",
    "DataLoaderDispatcher": "data.loaders.dispatch",
    "DataLoaderShard": "data.loaders.shard",
    "DeepSpeedPlugin": "config.plugins.deepspeed",
    "DeepSpeedSequenceParallelConfig": "config.plugins.parallelism",
    "DistributedDataParallelKwargs": "config.plugins.handlers",
    "DistributedType": "config.enums",
    "DummyOptim": "parallel.deepspeed.engine",
    "DummyScheduler": "parallel.deepspeed.engine",
    "DynamoBackend": "config.enums",
    "FP8RecipeKwargs": "config.plugins.fp8",
    "FullyShardedDataParallelPlugin": "config.plugins.sharding",
    "GeneralTracker": "tracking.general",
    "GradScalerKwargs": "config.plugins.handlers",
    "GradientAccumulationPlugin": "config.plugins.handlers",
    "GradientState": "runtime.loop.gradient_state",
    "HugeRandomSampler": "data.order.orders",
    "InitProcessGroupKwargs": "config.plugins.handlers",
    "Instrument": "instruments",
    "KwargsHandler": "config.plugins.handlers",
    "LocalSGD": "local_sgd",
    "LoggerType": "config.enums",
    "MSAMPRecipeKwargs": "config.plugins.fp8",
    "MegatronLMPlugin": "config.plugins.megatron",
    "OffloadConfig": "config.plugins.offload",
    "ParallelismConfig": "config.plugins.parallelism",
    "PartialState": "state",
    "PipelineConfig": "config.plugins.parallelism",
    "PrecisionType": "config.enums",
    "ProfileKwargs": "config.plugins.handlers",
    "ProjectConfiguration": "config.plugins.handlers",
    "RNGType": "config.enums",
    "SeedableRandomSampler": "data.order.orders",
    "TERecipeKwargs": "config.plugins.fp8",
    "TorchContextParallelConfig": "config.plugins.parallelism",
    "TorchDynamoPlugin": "config.plugins.compilation",
    "TorchTensorParallelConfig": "config.plugins.parallelism",
    "TorchTensorParallelPlugin": "config.plugins.parallelism",
    "broadcast": "runtime.collectives.operations",
    "broadcast_object_list": "runtime.collectives.operations",
    "compile_regions": "parallel.compilation",
    "concatenate": "runtime.collectives.nested",
    "convert_outputs_to_fp32": "runtime.collectives.nested",
    "convert_to_fp32": "runtime.collectives.nested",
    "cpu_offload": "inference.dispatch",
    "cpu_offload_with_hook": "inference.dispatch",
    "debug_launcher": "launch.notebook.launcher",
    "disk_offload": "inference.dispatch",
    "dispatch_model": "inference.dispatch",
    "extract_model_from_parallel": "parallel.modules.unwrapping",
    "find_batch_size": "runtime.collectives.nested",
    "find_executable_batch_size": "runtime.devices.memory",
    "gather": "runtime.collectives.operations",
    "gather_object": "runtime.collectives.operations",
    "get_logger": "logging",
    "has_compiled_regions": "parallel.compilation",
    "infer_auto_device_map": "inference.planning.device_map",
    "init_empty_weights": "inference.empty",
    "init_on_device": "inference.empty",
    "linear_cross_entropy": "parallel.modules.memory.losses",
    "load": "checkpoint.formats.codec",
    "load_and_quantize_model": "inference.quantized",
    "load_checkpoint_and_dispatch": "inference.loading",
    "load_checkpoint_in_model": "inference.loading",
    "merge_fsdp_weights": "checkpoint.parts.fsdp_files",
    "notebook_launcher": "launch.notebook.launcher",
    "offload_activations": "parallel.modules.memory.offloading",
    "on_main_process": "tracking.general",
    "pad_across_processes": "runtime.collectives.operations",
    "patch_environment": "config.environment",
    "prepare_pippy": "inference.pipeline",
    "ray_launcher": "tools.clusters.ray.launcher",
    "recompute_activations": "parallel.modules.memory.activations",
    "recursively_apply": "runtime.collectives.nested",
    "reduce": "runtime.collectives.operations",
    "release_memory": "runtime.devices.memory",
    "remove_hook_from_submodules": "inference.offload.hooks",
    "save": "checkpoint.formats.saving",
    "send_to_device": "runtime.collectives.nested",
    "set_seed": "runtime.loop.random",
    "skip_first_batches": "data.preparing",
    "slice_tensors": "runtime.collectives.nested",
    "step_full_tensors": "parallel.mesh.matrices.stepping",
    "step_in_backward": "parallel.modules.memory.stepping",
    "synchronize_rng_states": "runtime.loop.random",
    "tile_mlp": "parallel.modules.memory.tiling",
    "tqdm": "runtime.loop.bars",
    "wait_for_everyone": "runtime.group.runtime",
    "write_basic_config": "commands.config.default",
}

__all__ = ["__version__", "install", *_HOME_OF]

if TYPE_CHECKING:
    from .accelerator import (
        Accelerator as Accelerator,
    )
    from .checkpoint.formats.codec import (
        load as load,
    )
    from .checkpoint.formats.saving import (
        save as save,
    )
    from .checkpoint.parts.fsdp_files import (
        merge_fsdp_weights as merge_fsdp_weights,
    )
    from .commands.config.default import (
        write_basic_config as write_basic_config,
    )
    from .config.enums import (
        DDPCommunicationHookType as DDPCommunicationHookType,
        DistributedType as DistributedType,
        DynamoBackend as DynamoBackend,
        LoggerType as LoggerType,
        PrecisionType as PrecisionType,
        RNGType as RNGType,
    )
    from .config.environment import (
        patch_environment as patch_environment,
    )
    from .config.plugins.compilation import (
        TorchDynamoPlugin as TorchDynamoPlugin,
    )
    from .config.plugins.deepspeed import (
        DeepSpeedPlugin as DeepSpeedPlugin,
    )
    from .config.plugins.fp8 import (
        AORecipeKwargs as AORecipeKwargs,
        FP8RecipeKwargs as FP8RecipeKwargs,
        MSAMPRecipeKwargs as MSAMPRecipeKwargs,
        TERecipeKwargs as TERecipeKwargs,
    )
    from .config.plugins.handlers import (
        AutocastKwargs as AutocastKwargs,
        DataLoaderConfiguration as DataLoaderConfiguration,
        DistributedDataParallelKwargs as DistributedDataParallelKwargs,
        GradientAccumulationPlugin as GradientAccumulationPlugin,
        GradScalerKwargs as GradScalerKwargs,
        InitProcessGroupKwargs as InitProcessGroupKwargs,
        KwargsHandler as KwargsHandler,
        ProfileKwargs as ProfileKwargs,
        ProjectConfiguration as ProjectConfiguration,
    )
    from .config.plugins.megatron import (
        MegatronLMPlugin as MegatronLMPlugin,
    )
    from .config.plugins.offload import (
        OffloadConfig as OffloadConfig,
    )
    from .config.plugins.parallelism import (
        DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
        ParallelismConfig as ParallelismConfig,
        PipelineConfig as PipelineConfig,
        TorchContextParallelConfig as TorchContextParallelConfig,
        TorchTensorParallelConfig as TorchTensorParallelConfig,
        TorchTensorParallelPlugin as TorchTensorParallelPlugin,
    )
    from .config.plugins.quantization import (
        BnbQuantizationConfig as BnbQuantizationConfig,
    )
    from .config.plugins.sharding import (
        FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
    )
    from .data.loaders.dispatch import (
        DataLoaderDispatcher as DataLoaderDispatcher,
    )
    from .data.loaders.shard import (
        DataLoaderShard as DataLoaderShard,
    )
    from .data.order.orders import (
        HugeRandomSampler as HugeRandomSampler,
        SeedableRandomSampler as SeedableRandomSampler,
    )
    from .data.order.sharding import (
        BatchSamplerShard as BatchSamplerShard,
    )
    from .data.preparing import (
        skip_first_batches as skip_first_batches,
    )
    from .inference.dispatch import (
        cpu_offload as cpu_offload,
        cpu_offload_with_hook as cpu_offload_with_hook,
        disk_offload as disk_offload,
        dispatch_model as dispatch_model,
    )
    from .inference.empty import (
        init_empty_weights as init_empty_weights,
        init_on_device as init_on_device,
    )
    from .inference.loading import (
        load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
        load_checkpoint_in_model as load_checkpoint_in_model,
    )
    from .inference.pipeline import (
        prepare_pippy as prepare_pippy,
    )
    from .inference.planning.device_map import (
        infer_auto_device_map as infer_auto_device_map,
    )
    from .inference.quantized import (
        load_and_quantize_model as load_and_quantize_model,
    )
    from .instruments import (
        Instrument as Instrument,
    )
    from .launch.notebook.launcher import (
        debug_launcher as debug_launcher,
        notebook_launcher as notebook_launcher,
    )
    from .local_sgd import (
        LocalSGD as LocalSGD,
    )
    from .logging import (
        get_logger as get_logger,
    )
    from .optimizer import (
        AcceleratedOptimizer as AcceleratedOptimizer,
    )
    from .parallel.compilation import (
        compile_regions as compile_regions,
        has_compiled_regions as has_compiled_regions,
    )
    from .parallel.deepspeed.engine import (
        DummyOptim as DummyOptim,
        DummyScheduler as DummyScheduler,
    )
    from .parallel.mesh.matrices.stepping import (
        step_full_tensors as step_full_tensors,
    )
    from .parallel.modules.memory.activations import (
        recompute_activations as recompute_activations,
    )
    from .parallel.modules.memory.losses import (
        linear_cross_entropy as linear_cross_entropy,
    )
    from .parallel.modules.memory.offloading import (
        offload_activations as offload_activations,
    )
    from .parallel.modules.memory.stepping import (
        step_in_backward as step_in_backward,
    )
    from .parallel.modules.memory.tiling import (
        tile_mlp as tile_mlp,
    )
    from .parallel.modules.unwrapping import (
        extract_model_from_parallel as extract_model_from_parallel,
    )
    from .runtime.collectives.nested import (
        concatenate as concatenate,
        convert_outputs_to_fp32 as convert_outputs_to_fp32,
        convert_to_fp32 as convert_to_fp32,
        find_batch_size as find_batch_size,
        recursively_apply as recursively_apply,
        send_to_device as send_to_device,
        slice_tensors as slice_tensors,
    )
    from .runtime.collectives.operations import (
        broadcast as broadcast,
        broadcast_object_list as broadcast_object_list,
        gather as gather,
        gather_object as gather_object,
        pad_across_processes as pad_across_processes,
        reduce as reduce,
    )
    from .runtime.devices.memory import (
        find_executable_batch_size as find_executable_batch_size,
        release_memory as release_memory,
    )
    from .runtime.group.runtime import (
        wait_for_everyone as wait_for_everyone,
    )
    from .runtime.loop.bars import (
        tqdm as tqdm,
    )
    from .runtime.loop.gradient_state import (
        GradientState as GradientState,
    )
    from .runtime.loop.random import (
        set_seed as set_seed,
        synchronize_rng_states as synchronize_rng_states,
    )
    from .scheduler import (
        AcceleratedScheduler as AcceleratedScheduler,
    )
    from .state import (
        AcceleratorState as AcceleratorState,
        PartialState as PartialState,
    )
    from .tools.clusters.ray.launcher import (
        ray_launcher as ray_launcher,
    )
    from .tracking.general import (
        GeneralTracker as GeneralTracker,
        on_main_process as on_main_process,
    )


def install() -> None:
    """Let `import accelerate` be meshwright's, in this process and in those that it starts."""
    from .door import open_door

    open_door()


def load_ipython_extension(ipython: Any) -> None:
    """Run `%load_ext meshwright`: let `import accelerate` be meshwright's in this notebook."""
    install()


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562)."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
