"""The published package `accelerate`, in the version of its interface. What it names is part of `meshwright`."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

__version__ = "1.15.0+meshwright.1"

if TYPE_CHECKING:
    from .accelerator import (
        Accelerator as Accelerator,
    )
    from .big_modeling import (
        cpu_offload as cpu_offload,
        cpu_offload_with_hook as cpu_offload_with_hook,
        disk_offload as disk_offload,
        dispatch_model as dispatch_model,
        init_empty_weights as init_empty_weights,
        init_on_device as init_on_device,
        load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
    )
    from .data_loader import (
        skip_first_batches as skip_first_batches,
    )
    from .inference import (
        prepare_pippy as prepare_pippy,
    )
    from .launchers import (
        debug_launcher as debug_launcher,
        notebook_launcher as notebook_launcher,
    )
    from .parallelism_config import (
        ParallelismConfig as ParallelismConfig,
    )
    from .state import (
        PartialState as PartialState,
    )
    from .utils.dataclasses import (
        AutocastKwargs as AutocastKwargs,
        DataLoaderConfiguration as DataLoaderConfiguration,
        DDPCommunicationHookType as DDPCommunicationHookType,
        DeepSpeedPlugin as DeepSpeedPlugin,
        DistributedDataParallelKwargs as DistributedDataParallelKwargs,
        DistributedType as DistributedType,
        FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
        GradScalerKwargs as GradScalerKwargs,
        InitProcessGroupKwargs as InitProcessGroupKwargs,
        ProfileKwargs as ProfileKwargs,
    )
    from .utils.imports import (
        is_rich_available as is_rich_available,
    )
    from .utils.memory import (
        find_executable_batch_size as find_executable_batch_size,
    )
    from .utils.modeling import (
        infer_auto_device_map as infer_auto_device_map,
        load_checkpoint_in_model as load_checkpoint_in_model,
    )
    from .utils.random import (
        synchronize_rng_states as synchronize_rng_states,
    )

_HOME_OF = {
    "Accelerator": "accelerator",
    "AutocastKwargs": "utils.dataclasses",
    "DDPCommunicationHookType": "utils.dataclasses",
    "DataLoaderConfiguration": "utils.dataclasses",
    "DeepSpeedPlugin": "utils.dataclasses",
    "DistributedDataParallelKwargs": "utils.dataclasses",
    "DistributedType": "utils.dataclasses",
    "FullyShardedDataParallelPlugin": "utils.dataclasses",
    "GradScalerKwargs": "utils.dataclasses",
    "InitProcessGroupKwargs": "utils.dataclasses",
    "ParallelismConfig": "parallelism_config",
    "PartialState": "state",
    "ProfileKwargs": "utils.dataclasses",
    "cpu_offload": "big_modeling",
    "cpu_offload_with_hook": "big_modeling",
    "debug_launcher": "launchers",
    "disk_offload": "big_modeling",
    "dispatch_model": "big_modeling",
    "find_executable_batch_size": "utils.memory",
    "infer_auto_device_map": "utils.modeling",
    "init_empty_weights": "big_modeling",
    "init_on_device": "big_modeling",
    "is_rich_available": "utils.imports",
    "load_checkpoint_and_dispatch": "big_modeling",
    "load_checkpoint_in_model": "utils.modeling",
    "notebook_launcher": "launchers",
    "prepare_pippy": "inference",
    "skip_first_batches": "data_loader",
    "synchronize_rng_states": "utils.random",
}
_MODULES = (
    "accelerator",
    "big_modeling",
    "commands",
    "data_loader",
    "hooks",
    "inference",
    "launchers",
    "logging",
    "optimizer",
    "parallelism_config",
    "scheduler",
    "state",
    "tracking",
    "utils",
)
"""The modules that `import accelerate` is known to bring along."""

__all__ = ["__version__", *_HOME_OF]


def __getattr__(name: str) -> Any:
    """Import a name, or a module, when it is used (PEP 562)."""
    if name in _MODULES:
        return _import_module(f".{name}", __name__)
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(_import_module(f".{_HOME_OF[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, *_MODULES})
