"""The published module `accelerate.utils.deepspeed`."""

from meshwright.config.plugins.deepspeed import HfDeepSpeedConfig as HfDeepSpeedConfig
from meshwright.optimizer import AcceleratedOptimizer as _AcceleratedOptimizer
from meshwright.parallel.deepspeed.engine import (
    DeepSpeedEngineWrapper as DeepSpeedEngineWrapper,
    DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper,
    DummyOptim as DummyOptim,
    DummyScheduler as DummyScheduler,
)
from meshwright.parallel.deepspeed.strategy import (
    get_active_deepspeed_plugin as get_active_deepspeed_plugin,
    map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed,
)
from meshwright.published import publish as _publish

DeepSpeedOptimizerWrapper = _AcceleratedOptimizer

_publish(__name__)
