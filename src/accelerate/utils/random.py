"""The published module `accelerate.utils.random`."""

from meshwright.published import publish as _publish
from meshwright.runtime.loop.random import (
    set_seed as set_seed,
    synchronize_rng_state as synchronize_rng_state,
    synchronize_rng_states as synchronize_rng_states,
)

_publish(__name__)
