"""Choose the strategy for the settings: the only branch on the backend."""

from __future__ import annotations

import logging
from typing import Any

from ..config.combinations import Feature, require_combination
from ..config.plugins.handlers import DistributedDataParallelKwargs
from ..config.plugins.parallelism import ParallelismConfig
from ..config.plugins.sharding import FullyShardedDataParallelPlugin
from ..config.settings import AXES_OF_MODELS, TrainingSettings
from ..runtime.devices.device import is_xla
from ..runtime.group.runtime import Runtime
from ..runtime.membership.member import Member
from .base import Strategy
from .replicas.ddp import DataParallel
from .single import SingleProcess

logger = logging.getLogger(__name__)


def features_of(
    runtime: Runtime, settings: TrainingSettings, ddp: DistributedDataParallelKwargs | None
) -> dict[Feature, str]:
    """Return the features that a run uses, as messages name them."""
    given = {
        Feature.DDP_OPTIONS: ddp is not None,
        Feature.XLA: is_xla(runtime.device),
        Feature.SURVIVE: runtime.member is not None,
    }
    return settings.features() | {feature: feature.value for feature, is_given in given.items() if is_given}


def strategy_for(
    runtime: Runtime, settings: TrainingSettings, ddp: DistributedDataParallelKwargs | None = None
) -> Strategy:
    """Return the strategy for these settings; refuse those that do not go together."""
    in_use = features_of(runtime, settings, ddp)
    require_combination(in_use)
    if settings.parallelism is not None and Feature.XLA not in in_use:
        settings.parallelism.fitted(runtime.process.world_size)
    if settings.offload is not None:
        from .replicas.offload.strategy import StreamedBlocks

        return StreamedBlocks(runtime, settings.offload, ddp)
    if Feature.XLA in in_use:
        from .mesh.xla import XlaDevices

        return XlaDevices(runtime, settings.sharding, settings.parallelism)
    if settings.deepspeed is not None:
        from .deepspeed.strategy import DeepSpeedEngines

        return DeepSpeedEngines(runtime, settings.deepspeed)
    if runtime.member is not None:
        return _surviving(runtime, runtime.member, settings)
    if runtime.num_processes == 1:
        if settings.sharding is not None:
            logger.info("There is one process: nothing is sharded, and the settings of FSDP have no effect.")
        return SingleProcess(runtime)
    if settings.sharding is None and not any(Feature(f"{axis}_size") in in_use for axis in AXES_OF_MODELS):
        return DataParallel(runtime, ddp)
    if ddp is not None and runtime.is_main_process:
        logger.warning("DistributedDataParallelKwargs has no effect: these models are spread over a mesh, not by DDP.")
    return _on_mesh(runtime, settings)


def _on_mesh(runtime: Runtime, settings: TrainingSettings) -> Strategy:
    from ..runtime.group.mesh import Mesh
    from .mesh.sharded import MeshParallel

    precision = "bf16" if settings.mixed_precision == "fp8" else settings.mixed_precision
    sharding = _in_precision(settings.sharding, precision)
    mesh = Mesh.of(settings.parallelism or _default_parallelism(runtime, runtime.num_processes, sharding), runtime)
    if mesh.config.pp_enabled:
        from .pipeline.strategy import PipelineParallel

        return PipelineParallel(runtime, mesh, sharding)
    return MeshParallel(runtime, mesh, sharding)


def _surviving(runtime: Runtime, member: Member, settings: TrainingSettings) -> Strategy:
    parallelism = settings.parallelism
    if settings.sharding is None and (parallelism is None or not parallelism.dp_shard_enabled):
        from .replicas.surviving import SurvivingReplicas

        return SurvivingReplicas(runtime, member)
    from .replicas.sharded import SurvivingShards

    sharding = _in_precision(settings.sharding, settings.mixed_precision)
    parallelism = parallelism or _default_parallelism(runtime, member.replicas, sharding)
    return SurvivingShards(runtime, member, parallelism, sharding)


def _in_precision(
    sharding: FullyShardedDataParallelPlugin | None, mixed_precision: str
) -> FullyShardedDataParallelPlugin:
    sharding = sharding or FullyShardedDataParallelPlugin()
    if mixed_precision != "no":
        sharding.set_mixed_precision(mixed_precision)
    return sharding


def _default_parallelism(
    runtime: Runtime, num_processes: int, sharding: FullyShardedDataParallelPlugin
) -> ParallelismConfig:
    hosts = num_processes // runtime.process.local_world_size if sharding.copy_per_host else 1
    # Not those of the environment.
    others: dict[str, Any] = {f"{axis}_size": 1 for axis in ("pp", "cp", "tp", "sp", "ep")}
    return ParallelismConfig(dp_replicate_size=hosts, dp_shard_size=num_processes // hosts, **others)
