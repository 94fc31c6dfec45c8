"""The published module `accelerate.accelerator`."""

from typing import TYPE_CHECKING, Any

import torch as torch

from meshwright.accelerator import Accelerator as Accelerator
from meshwright.parallel.mesh.fsdp2 import (  # `.utils.fsdp_utils` also imports torch.distributed.checkpoint
    fsdp2_apply_ac as fsdp2_apply_ac,
    fsdp2_prepare_model as fsdp2_prepare_model,
)
from meshwright.published import publish as _publish

from . import data_loader as data_loader, optimizer as optimizer, scheduler as scheduler, state as state, utils as utils
from .data_loader import prepare_data_loader as prepare_data_loader
from .parallelism_config import ParallelismConfig as ParallelismConfig
from .state import AcceleratorState as AcceleratorState
from .utils.ao import convert_model_to_fp8_ao as convert_model_to_fp8_ao
from .utils.dataclasses import (
    DataLoaderConfiguration as DataLoaderConfiguration,
    GradientAccumulationPlugin as GradientAccumulationPlugin,
    TorchDynamoPlugin as TorchDynamoPlugin,
)

if TYPE_CHECKING:
    from .utils.modeling import get_state_dict_offloaded_model as get_state_dict_offloaded_model

_publish(__name__)


def __getattr__(name: str) -> Any:
    """Import a name when it is used (PEP 562): few scripts offload."""
    if name != "get_state_dict_offloaded_model":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .utils.modeling import get_state_dict_offloaded_model

    return get_state_dict_offloaded_model
