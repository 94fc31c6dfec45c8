"""Settings -> strategy: the only branch on the backend."""

from __future__ import annotations

from ..config.plugins import DistributedDataParallelKwargs
from ..runtime.runtime import Runtime
from .base import Strategy
from .ddp import DataParallel
from .single import SingleProcess


def strategy_for(runtime: Runtime, *, ddp: DistributedDataParallelKwargs | None) -> Strategy:
    """Choose how models are spread."""
    if runtime.num_processes == 1:
        return SingleProcess(runtime)
    return DataParallel(runtime, ddp)
