"""Published path of Megatron-LM's names; the engine is not here, see `accelerate.parallel.megatron`."""

from .megatron_names import MegatronLMDummyDataLoader, MegatronLMDummyScheduler

__all__ = ["MegatronLMDummyDataLoader", "MegatronLMDummyScheduler"]
