"""The published module `accelerate.optimizer`."""

from meshwright.optimizer import (
    AcceleratedOptimizer as AcceleratedOptimizer,
    move_to_device as move_to_device,
)
from meshwright.published import publish as _publish

_publish(__name__)
