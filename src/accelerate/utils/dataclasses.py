"""Published path of the plugins and choices; they live in `accelerate.config`."""

from ..config.enums import (
    BaseEnum,
    DDPCommunicationHookType,
    DistributedType,
    LoggerType,
    PrecisionType,
    RNGType,
)
from ..config.plugins import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
)
from ..runtime.nested import TensorInformation

__all__ = [
    "AutocastKwargs",
    "BaseEnum",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "TensorInformation",
]
