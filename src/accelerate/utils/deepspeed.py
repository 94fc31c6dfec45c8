"""Published path of what other libraries import for DeepSpeed. DeepSpeed itself is imported when an engine is made."""

from __future__ import annotations

from typing import Any

from ..config.plugins.deepspeed import DeepSpeedPlugin, HfDeepSpeedConfig
from ..optimizer import AcceleratedOptimizer as DeepSpeedOptimizerWrapper
from ..parallel.deepspeed.engine import DeepSpeedEngineWrapper, DeepSpeedSchedulerWrapper, DummyOptim, DummyScheduler
from ..parallel.deepspeed.strategy import map_pytorch_optim_to_deepspeed


def get_active_deepspeed_plugin(state: Any) -> DeepSpeedPlugin:
    """Return the plugin that the next model uses."""
    plugin = state.deepspeed_plugin
    if not isinstance(plugin, DeepSpeedPlugin):
        raise ValueError("DeepSpeed does not train here: Accelerator(deepspeed_plugin=...) asks for it.")
    return plugin


__all__ = [
    "DeepSpeedEngineWrapper",
    "DeepSpeedOptimizerWrapper",
    "DeepSpeedSchedulerWrapper",
    "DummyOptim",
    "DummyScheduler",
    "HfDeepSpeedConfig",
    "get_active_deepspeed_plugin",
    "map_pytorch_optim_to_deepspeed",
]
