"""The published module `accelerate.commands.config.config_utils`."""

from meshwright.commands.arguments import SubcommandHelpFormatter as SubcommandHelpFormatter
from meshwright.config.enums import (
    ComputeEnvironment as ComputeEnvironment,
    DistributedType as DistributedType,
    DynamoBackend as DynamoBackend,
    FP8BackendType as FP8BackendType,
    PrecisionType as PrecisionType,
)
from meshwright.published import publish as _publish

from ..menu import BulletMenu as BulletMenu

DYNAMO_BACKENDS = [backend for backend in DynamoBackend.list() if backend not in ("NO", "HPU_BACKEND", "NEURON")]

_publish(__name__)
