"""The published module `accelerate.utils.dataclasses`."""

from meshwright.config.enums import (
    BaseEnum as BaseEnum,
    ComputeEnvironment as ComputeEnvironment,
    CustomDtype as CustomDtype,
    DDPCommunicationHookType as DDPCommunicationHookType,
    DistributedType as DistributedType,
    DynamoBackend as DynamoBackend,
    FP8BackendType as FP8BackendType,
    LoggerType as LoggerType,
    PrecisionType as PrecisionType,
    RNGType as RNGType,
)
from meshwright.config.plugins.compilation import TorchDynamoPlugin as TorchDynamoPlugin
from meshwright.config.plugins.deepspeed import DeepSpeedPlugin as DeepSpeedPlugin
from meshwright.config.plugins.fp8 import (
    AORecipeKwargs as AORecipeKwargs,
    FP8RecipeKwargs as FP8RecipeKwargs,
    MSAMPRecipeKwargs as MSAMPRecipeKwargs,
    TERecipeKwargs as TERecipeKwargs,
)
from meshwright.config.plugins.handlers import (
    AutocastKwargs as AutocastKwargs,
    DataLoaderConfiguration as DataLoaderConfiguration,
    DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    GradientAccumulationPlugin as GradientAccumulationPlugin,
    GradScalerKwargs as GradScalerKwargs,
    InitProcessGroupKwargs as InitProcessGroupKwargs,
    KwargsHandler as KwargsHandler,
    ProfileKwargs as ProfileKwargs,
    ProjectConfiguration as ProjectConfiguration,
)
from meshwright.config.plugins.megatron import MegatronLMPlugin as MegatronLMPlugin
from meshwright.config.plugins.parallelism import (
    DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig as TorchContextParallelConfig,
    TorchTensorParallelConfig as TorchTensorParallelConfig,
    TorchTensorParallelPlugin as TorchTensorParallelPlugin,
)
from meshwright.config.plugins.quantization import BnbQuantizationConfig as BnbQuantizationConfig
from meshwright.config.plugins.sharding import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from meshwright.published import publish as _publish
from meshwright.runtime.collectives.nested import TensorInformation as TensorInformation
from meshwright.runtime.modules import get_module_class_from_name as get_module_class_from_name

from ..parallelism_config import ParallelismConfig as ParallelismConfig

_publish(__name__)
