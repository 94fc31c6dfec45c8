"""Five lines take a PyTorch training loop from one process to many.

The public names are loaded on first use, so that importing one of them costs no more than it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "2.0.0.dev0"

_HOME_OF = {
    "Accelerator": "accelerator",
    "AutocastKwargs": "config.plugins.handlers",
    "DDPCommunicationHookType": "config.enums",
    "DataLoaderConfiguration": "config.plugins.handlers",
    "DeepSpeedPlugin": "config.plugins.deepspeed",
    "DistributedDataParallelKwargs": "config.plugins.handlers",
    "DistributedType": "config.enums",
    "FullyShardedDataParallelPlugin": "config.plugins.sharding",
    "GradScalerKwargs": "config.plugins.handlers",
    "InitProcessGroupKwargs": "config.plugins.handlers",
    "ParallelismConfig": "config.plugins.parallelism",
    "PartialState": "state",
    "ProfileKwargs": "config.plugins.handlers",
    "cpu_offload": "inference.dispatch",
    "cpu_offload_with_hook": "inference.dispatch",
    "debug_launcher": "launchers",
    "disk_offload": "inference.dispatch",
    "dispatch_model": "inference.dispatch",
    "find_executable_batch_size": "runtime.devices.memory",
    "infer_auto_device_map": "inference.planning.device_map",
    "init_empty_weights": "inference.empty",
    "init_on_device": "inference.empty",
    "is_rich_available": "runtime.devices.abilities",
    "load_checkpoint_and_dispatch": "inference.loading",
    "load_checkpoint_in_model": "inference.loading",
    "notebook_launcher": "launchers",
    "prepare_pippy": "inference",
    "skip_first_batches": "data.preparing",
    "synchronize_rng_states": "runtime.loop.random",
}

_MODULES = (
    *("accelerator", "big_modeling", "commands", "data_loader", "hooks", "inference", "launchers", "logging"),
    *("optimizer", "parallelism_config", "scheduler", "state", "tracking", "utils"),
)
"""The modules that `import accelerate` is known to bring along."""

__all__ = ["__version__", *_HOME_OF]

if TYPE_CHECKING:
    from .accelerator import Accelerator as Accelerator
    from .config.enums import DDPCommunicationHookType as DDPCommunicationHookType
    from .config.enums import DistributedType as DistributedType
    from .config.plugins.deepspeed import DeepSpeedPlugin as DeepSpeedPlugin
    from .config.plugins.handlers import AutocastKwargs as AutocastKwargs
    from .config.plugins.handlers import DataLoaderConfiguration as DataLoaderConfiguration
    from .config.plugins.handlers import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from .config.plugins.handlers import GradScalerKwargs as GradScalerKwargs
    from .config.plugins.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
    from .config.plugins.handlers import ProfileKwargs as ProfileKwargs
    from .config.plugins.parallelism import ParallelismConfig as ParallelismConfig
    from .config.plugins.sharding import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from .data.preparing import skip_first_batches as skip_first_batches
    from .inference import prepare_pippy as prepare_pippy
    from .inference.dispatch import cpu_offload as cpu_offload
    from .inference.dispatch import cpu_offload_with_hook as cpu_offload_with_hook
    from .inference.dispatch import disk_offload as disk_offload
    from .inference.dispatch import dispatch_model as dispatch_model
    from .inference.empty import init_empty_weights as init_empty_weights
    from .inference.empty import init_on_device as init_on_device
    from .inference.loading import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
    from .inference.loading import load_checkpoint_in_model as load_checkpoint_in_model
    from .inference.planning.device_map import infer_auto_device_map as infer_auto_device_map
    from .launchers import debug_launcher as debug_launcher
    from .launchers import notebook_launcher as notebook_launcher
    from .runtime.devices.abilities import is_rich_available as is_rich_available
    from .runtime.devices.memory import find_executable_batch_size as find_executable_batch_size
    from .runtime.loop.random import synchronize_rng_states as synchronize_rng_states
    from .state import PartialState as PartialState


def __getattr__(name: str) -> Any:
    """Load a public name, or a module, when it is first asked for (PEP 562)."""
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, *_MODULES})
