"""The published module `accelerate.utils.memory`."""

from meshwright.published import publish as _publish
from meshwright.runtime.devices.device import clear_device_cache as clear_device_cache
from meshwright.runtime.devices.memory import (
    find_executable_batch_size as find_executable_batch_size,
    release_memory as release_memory,
    should_reduce_batch_size as should_reduce_batch_size,
)

_publish(__name__)
