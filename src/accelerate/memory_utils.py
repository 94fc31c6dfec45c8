"""The published module `accelerate.memory_utils`."""

from meshwright.published import publish as _publish

from .utils.memory import (
    find_executable_batch_size as find_executable_batch_size,
    release_memory as release_memory,
    should_reduce_batch_size as should_reduce_batch_size,
)

_publish(__name__)
