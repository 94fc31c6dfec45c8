"""The published module `accelerate.utils.megatron_lm`."""

from meshwright.config.plugins.megatron import MegatronLMDummyDataLoader as MegatronLMDummyDataLoader
from meshwright.published import publish as _publish
from meshwright.scheduler import MegatronLMDummyScheduler as MegatronLMDummyScheduler

_publish(__name__)
