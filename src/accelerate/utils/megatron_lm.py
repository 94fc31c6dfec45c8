"""Published path of Megatron-LM's names."""

from ..scheduler import MegatronLMDummyScheduler
from .megatron_names import MegatronLMDummyDataLoader

__all__ = ["MegatronLMDummyDataLoader", "MegatronLMDummyScheduler"]
