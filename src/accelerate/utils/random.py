"""Published path of the seeds; they live in `accelerate.runtime.loop.random`."""

from ..runtime.loop.random import set_seed, synchronize_rng_state, synchronize_rng_states

__all__ = ["set_seed", "synchronize_rng_state", "synchronize_rng_states"]
