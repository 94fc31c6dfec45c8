"""Choose the strategy for the settings: the only branch on the backend."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..config.plugins.deepspeed import DeepSpeedPlugin
from ..config.plugins.handlers import DistributedDataParallelKwargs
from ..config.plugins.offload import OffloadConfig
from ..config.plugins.parallelism import ParallelismConfig
from ..config.plugins.sharding import FullyShardedDataParallelPlugin
from ..errors import UnsupportedSettingError
from ..runtime.devices.device import is_xla
from ..runtime.group.runtime import Runtime
from ..runtime.membership.member import Member
from .base import Strategy
from .replicas.ddp import DataParallel
from .single import SingleProcess

logger = logging.getLogger(__name__)


def strategy_for(
    runtime: Runtime,
    *,
    ddp: DistributedDataParallelKwargs | None = None,
    sharding: FullyShardedDataParallelPlugin | None = None,
    deepspeed: Mapping[str, DeepSpeedPlugin] | None = None,
    parallelism: ParallelismConfig | None = None,
    offload: OffloadConfig | None = None,
    mixed_precision: str = "no",
) -> Strategy:
    """Return the strategy for these settings."""
    if offload is not None:
        return _offloading(runtime, offload, ddp, sharding, deepspeed, parallelism, mixed_precision)
    if is_xla(runtime.device):
        return _on_xla(runtime, sharding, deepspeed, parallelism)
    if parallelism is not None:
        _fit(parallelism, runtime.process.world_size)
    if deepspeed is not None:
        return _engines_of(runtime, deepspeed, sharding, parallelism)
    if runtime.member is not None:
        return _surviving(runtime, runtime.member, ddp, sharding, parallelism, mixed_precision)
    if runtime.num_processes == 1:
        if sharding is not None:
            logger.info("There is one process: nothing is sharded, and the settings of FSDP have no effect.")
        return SingleProcess(runtime)
    if sharding is None and set(_axes_of(parallelism)) <= {"dp_replicate"}:
        return DataParallel(runtime, ddp)
    return _on_mesh(runtime, ddp, sharding, parallelism, mixed_precision)


def _on_mesh(
    runtime: Runtime,
    ddp: DistributedDataParallelKwargs | None,
    sharding: FullyShardedDataParallelPlugin | None,
    parallelism: ParallelismConfig | None,
    mixed_precision: str,
) -> Strategy:
    from ..runtime.group.mesh import Mesh
    from .mesh.sharded import MeshParallel

    if ddp is not None and runtime.is_main_process:
        logger.warning("DistributedDataParallelKwargs has no effect: these models are spread over a mesh, not by DDP.")
    sharding = sharding or FullyShardedDataParallelPlugin()
    if mixed_precision != "no":
        sharding.set_mixed_precision("bf16" if mixed_precision == "fp8" else mixed_precision)
    mesh = Mesh.of(parallelism or _default_parallelism(runtime, runtime.num_processes, sharding), runtime)
    if mesh.config.pp_enabled:
        from .pipeline.strategy import PipelineParallel

        return PipelineParallel(runtime, mesh, sharding, mixed_precision)
    return MeshParallel(runtime, mesh, sharding)


def _offloading(
    runtime: Runtime,
    offload: OffloadConfig,
    ddp: DistributedDataParallelKwargs | None,
    sharding: FullyShardedDataParallelPlugin | None,
    deepspeed: Mapping[str, DeepSpeedPlugin] | None,
    parallelism: ParallelismConfig | None,
    mixed_precision: str,
) -> Strategy:
    axes = [axis for axis in _axes_of(parallelism) if axis != "dp_replicate"]
    for setting, given, reason in (
        ("FSDP", sharding, "FSDP moves its shards itself: FullyShardedDataParallelPlugin(cpu_offload=True)."),
        ("DeepSpeed", deepspeed, "DeepSpeed offloads by its own settings (offload_param, offload_optimizer)."),
        (f"the axes {', '.join(axes)}", axes, "it keeps whole blocks of a replica on the host."),
        ("--survive", runtime.member, "a process that is replaced would need the blocks on the host, too."),
        ("XLA", is_xla(runtime.device), "its operations are recorded, and not executed in streams."),
        ("mixed_precision='fp8'", mixed_precision == "fp8", "fp8 layers keep scales beside their weights."),
        ("mixed_precision='fp16'", mixed_precision == "fp16", "torch's scaler expects all gradients on the device."),
    ):
        if given:
            raise UnsupportedSettingError(f"offload={offload.placement!r} with {setting}", reason, "Leave one out.")
    from .replicas.offload.strategy import StreamedBlocks

    return StreamedBlocks(runtime, offload, ddp)


def _surviving(
    runtime: Runtime,
    member: Member,
    ddp: DistributedDataParallelKwargs | None,
    sharding: FullyShardedDataParallelPlugin | None,
    parallelism: ParallelismConfig | None,
    mixed_precision: str,
) -> Strategy:
    if mixed_precision in ("fp16", "fp8"):
        raise UnsupportedSettingError(
            f"--survive with mixed_precision={mixed_precision!r}",
            "its scales are not part of the step's transaction.",
            "Use bf16.",
        )
    axes = [axis for axis in _axes_of(parallelism) if axis not in ("dp_replicate", "dp_shard")]
    for setting, given in ((f"the axes {', '.join(axes)}", axes), ("DDP's options", ddp)):
        if given:
            raise UnsupportedSettingError(
                f"--survive with {setting}",
                "it replaces whole copies of a model, each on one process or sharded by FSDP.",
                "Leave it out.",
            )
    if sharding is None and "dp_shard" not in _axes_of(parallelism):
        from .replicas.surviving import SurvivingReplicas

        return SurvivingReplicas(runtime, member)
    from .replicas.sharded import SurvivingShards

    sharding = sharding or FullyShardedDataParallelPlugin()
    if mixed_precision != "no":
        sharding.set_mixed_precision(mixed_precision)
    return SurvivingShards(
        runtime, member, parallelism or _default_parallelism(runtime, member.replicas, sharding), sharding
    )


def _axes_of(parallelism: ParallelismConfig | None) -> list[str]:
    """Return the axes of more than one process, also the one that is a view of others."""
    if parallelism is None:
        return []
    return [*parallelism.active_mesh_dims, *(["ep"] if parallelism.ep_enabled else [])]


def _fit(parallelism: ParallelismConfig, num_processes: int) -> None:
    for first, second in (("cp", "sp"), ("pp", "sp")):
        if parallelism.size(first) > 1 and parallelism.size(second) > 1:
            raise UnsupportedSettingError(
                f"{first}_size={parallelism.size(first)} with {second}_size={parallelism.size(second)}",
                "sequences are divided over one axis, and Ulysses (sp_size) needs whole models.",
                "Use cp_size for both." if first == "cp" else "Use cp_size with pp_size.",
            )
    if parallelism.ep_enabled and parallelism.pp_enabled:
        raise UnsupportedSettingError(
            f"ep_size={parallelism.ep_size} with pp_size={parallelism.pp_size}",
            "experts are spread over the processes that share a whole model.",
            "Use dp_shard_size, tp_size or cp_size instead of pp_size.",
        )
    parallelism.fitted(num_processes)


def _on_xla(
    runtime: Runtime,
    sharding: FullyShardedDataParallelPlugin | None,
    deepspeed: Mapping[str, DeepSpeedPlugin] | None,
    parallelism: ParallelismConfig | None,
) -> Strategy:
    if deepspeed is not None:
        raise UnsupportedSettingError("DeepSpeed on XLA", "it has no XLA backend.", "Use fsdp_plugin.")
    if parallelism is not None and parallelism.ep_enabled:
        raise UnsupportedSettingError(
            f"ep_size={parallelism.ep_size} on XLA",
            "tokens travel by an all-to-all of torch.distributed.",
            "Leave it out.",
        )
    from .mesh.xla import XlaDevices

    return XlaDevices(runtime, sharding, parallelism)


def _engines_of(
    runtime: Runtime,
    plugins: Mapping[str, DeepSpeedPlugin],
    sharding: FullyShardedDataParallelPlugin | None,
    parallelism: ParallelismConfig | None,
) -> Strategy:
    if sharding is not None:
        raise ValueError("FSDP and DeepSpeed both shard a model: give fsdp_plugin or deepspeed_plugin, not both.")
    axes = _axes_of(parallelism)
    if set(axes) - {"dp_replicate", "dp_shard"}:
        raise UnsupportedSettingError(
            f"ParallelismConfig with the axes {', '.join(axes)} and DeepSpeed",
            "DeepSpeed lays out the processes itself.",
            "Say it in DeepSpeed's config, or leave the deepspeed_plugin out.",
        )
    from .deepspeed.strategy import DeepSpeedEngines

    return DeepSpeedEngines(runtime, plugins)


def _default_parallelism(
    runtime: Runtime, num_processes: int, sharding: FullyShardedDataParallelPlugin
) -> ParallelismConfig:
    hosts = num_processes // runtime.process.local_world_size if sharding.copy_per_host else 1
    # Not those of the environment.
    others: dict[str, Any] = {f"{axis}_size": 1 for axis in ("pp", "cp", "tp", "sp", "ep")}
    return ParallelismConfig(dp_replicate_size=hosts, dp_shard_size=num_processes // hosts, **others)
