"""The published module `accelerate.state`."""

from meshwright.published import publish as _publish
from meshwright.runtime.loop.gradient_state import GradientState as GradientState
from meshwright.state import (
    AcceleratorState as AcceleratorState,
    PartialState as PartialState,
    do_nothing as do_nothing,
    is_initialized as is_initialized,
)

_publish(__name__)
