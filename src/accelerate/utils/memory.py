"""Published path of the memory helpers; they live in `accelerate.runtime.devices.memory`."""

from ..parallel.modules.memory.activations import recompute_activations
from ..parallel.modules.memory.losses import linear_cross_entropy
from ..parallel.modules.memory.offloading import offload_activations
from ..parallel.modules.memory.stepping import step_in_backward
from ..parallel.modules.memory.tiling import tile_mlp
from ..runtime.devices.memory import (
    clear_device_cache,
    find_executable_batch_size,
    release_memory,
    should_reduce_batch_size,
)

__all__ = [
    "clear_device_cache",
    "find_executable_batch_size",
    "linear_cross_entropy",
    "offload_activations",
    "recompute_activations",
    "release_memory",
    "should_reduce_batch_size",
    "step_in_backward",
    "tile_mlp",
]
