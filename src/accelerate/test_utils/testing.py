"""The published module `accelerate.test_utils.testing`."""

from meshwright.published import publish as _publish
from meshwright.testing.machine import (
    are_the_same_tensors as are_the_same_tensors,
    device_count as device_count,
    get_backend as get_backend,
    torch_device as torch_device,
)

_publish(__name__)
