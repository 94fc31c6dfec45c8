"""Replicas that are spread over several processes by FSDP2, and that may be lost and replaced.

[Note: a replica decides as one] Inside a replica FSDP2 shards the model over the replica's own process group, which
stays while the members of the run change. Across replicas each process sums its shards of the gradients with its
counterparts, so there are as many independent reductions as a replica has processes, and some may complete while
another fails. A replica has made a step only when all of its processes have their sums. So after every such collective
the processes of a replica tell each other whether it failed, by one small all-reduce inside: all go on, or all
recover. A replica that is behind copies the step shard by shard from one that is ahead, and nothing of it is
restored before all of its processes have received theirs.

An all-reduce inside that fails means that this replica has lost a process. It leaves as a whole: its launcher kills
the others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...config.plugins.parallelism import ParallelismConfig
from ...config.plugins.sharding import FullyShardedDataParallelPlugin
from ...errors import UnsupportedSettingError
from ...program import program_name
from ...runtime.collectives.operations import sendable
from ...runtime.devices.device import finest_reduced_float
from ...runtime.group.mesh import Mesh
from ...runtime.group.runtime import Runtime
from ...runtime.membership.member import SECONDS_TO_BE_KILLED, Member, MembershipChanged
from ..base import full_steps_of
from ..mesh.sharded import MeshParallel
from ..modules.averaging import broadcast_parameters
from ..modules.dtensors import dtensor_like, mesh_of
from ..modules.spread import Layout
from .reducer import GradientReducer
from .surviving import SurvivingReplicas, refuse_running_statistics


class SurvivingShards(SurvivingReplicas, MeshParallel):
    """Train replicas of a sharded model; see [Note: a replica decides as one]."""

    def __init__(
        self, runtime: Runtime, member: Member, config: ParallelismConfig, plugin: FullyShardedDataParallelPlugin
    ) -> None:
        refuse_settings(runtime, config)
        self._groups = runtime.spread_replica(config.size("dp_shard"))
        inside = DeviceMesh.from_group(self._groups.inside, runtime.device.type, mesh_dim_names=("dp_shard",))
        super().__init__(runtime, member, _ReplicaMesh(config, inside), plugin)

    @property
    def asks_for(self) -> str:
        """How this strategy spreads a model, in words."""
        shards = self.member.shards
        replicas = self.member.replicas // shards
        return (
            f"{replicas} copies of the model, each sharded over {shards} processes ({program_name()} launch --survive)"
        )

    def fits(self, layout: Layout, model: nn.Module) -> bool:
        """Return False: the groups of a model that came sharded are lost with the members."""
        return False

    # --- groups -----------------------------------------------------------------------------------------------------

    @property
    def counterparts(self) -> Any:
        """The group of the processes with the same shards."""
        return self._groups.counterparts

    @property
    def data_group(self) -> Any:
        """The processes that see different samples: all."""
        return None

    @property
    def gradient_group(self) -> Any:
        """The processes over which gradients are averaged: all."""
        return None

    @property
    def replicas(self) -> tuple[Sequence[int], Any]:
        """The present counterparts, by nominal rank."""
        ranks = self.member.counterparts()
        return (ranks, self.counterparts) if len(ranks) > 1 else ((), None)

    # --- prepare ----------------------------------------------------------------------------------------------------

    def wrap(self, model: nn.Module) -> nn.Module:
        """Shard a model inside of this replica, and collect the gradients of its shards."""
        refuse_running_statistics(model)
        scalars = [name for name, param in model.named_parameters() if param.dim() == 0]
        if scalars:
            raise UnsupportedSettingError(
                f"--survive with sharded replicas and the scalar parameter {scalars[0]}",
                "a scalar is not sharded, and gradients of what is not sharded are not part of the step's transaction.",
                "Make it a parameter of shape (1,).",
            )
        model = MeshParallel.wrap(self, model)
        self.models.append(model)
        shards = [LocalShard(param) for param in model.parameters() if param.requires_grad]
        if shards:
            self._add_reducer(GradientReducer(shards, overlaps=False))  # type: ignore[arg-type]
        return model

    def _copy_from_first(self, model: nn.Module, experts: list[nn.Parameter]) -> None:
        """Give all replicas the shards of the first one, and its buffers."""
        for buffer in model.buffers():
            dist.broadcast(sendable(buffer.detach()), src=0)
        if self.counterparts is not None:
            shards = [param for param in model.parameters() if mesh_of(param) is not None]
            broadcast_parameters(shards, self.counterparts, self.runtime.device)

    def _rebind(self, optimizer: torch.optim.Optimizer) -> None:
        super()._rebind(optimizer)
        if full_steps_of(optimizer) is not None:
            raise UnsupportedSettingError(
                f"--survive with {type(optimizer).__name__} and sharded replicas",
                "each matrix is stepped whole by one process of a replica, which was not tried with processes that "
                "are replaced.",
                "Leave --survive out, or use replicas of one process each, or another optimizer.",
            )

    # --- the step ---------------------------------------------------------------------------------------------------

    def _sum(self, signal: float, again: bool) -> tuple[float, Tensor | None]:
        """Sum gradients, signals and items; raise on all processes of this replica if it failed on one."""
        error: RuntimeError | None = None
        total, items = 0.0, self.items
        try:
            total, items = super()._sum(signal, again)
        except RuntimeError as found:
            error = found
        failed, total, count = self._sum_inside(float(error is not None), total, 0.0 if items is None else float(items))
        if failed:
            raise error or _failed_elsewhere(self.member)
        return total, None if items is None else items.new_tensor(count)

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """Raise at the end of the context, on all processes of this replica, if it failed on one of them."""
        error: RuntimeError | None = None
        try:
            yield
        except RuntimeError as found:
            error = found
        [failed] = self._sum_inside(float(error is not None))
        if failed:
            raise error or _failed_elsewhere(self.member)

    def _sum_inside(self, *numbers: float) -> list[float]:
        """Sum numbers over the processes of this replica."""
        total = torch.tensor(numbers, dtype=finest_reduced_float(self.runtime.device), device=self.runtime.device)
        try:
            dist.all_reduce(total, group=self._groups.inside)
            return total.tolist()
        except RuntimeError as error:
            self._leave(error)

    def _leave(self, error: RuntimeError) -> NoReturn:
        """End this process, because another one of its replica was lost."""
        time.sleep(SECONDS_TO_BE_KILLED)
        raise SystemExit(f"Rank {self.member.rank}: its replica has lost a process ({error}).") from error


class LocalShard:
    """The part of a sharded parameter on this process; to a `GradientReducer` it is a parameter."""

    def __init__(self, param: nn.Parameter) -> None:
        spread: Any = param
        self._param = param
        self._own: Tensor = spread._local_tensor
        self.requires_grad = param.requires_grad
        self.register_post_accumulate_grad_hook = param.register_post_accumulate_grad_hook
        self.dtype, self.device, self.nbytes = self._own.dtype, self._own.device, self._own.nbytes
        self.numel, self.size = self._own.numel, self._own.size

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let torch's functions, as `empty_like`, see the plain tensor."""
        return function(*(arg._own if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))

    @property
    def grad(self) -> Tensor | None:
        """The local part of the gradient."""
        gradient: Any = self._param.grad
        return None if gradient is None else gradient._local_tensor

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._param.grad = None if value is None else dtensor_like(self._param, value)


class _ReplicaMesh(Mesh):
    """The mesh inside of a replica, with the configuration of the whole run."""

    def __init__(self, config: ParallelismConfig, inside: DeviceMesh) -> None:
        self.config = config
        self.device_mesh = self.sharding = config.device_mesh = inside


def _failed_elsewhere(member: Member) -> RuntimeError:
    return MembershipChanged(f"Rank {member.rank}: a collective of another process of its replica failed.")


def refuse_settings(runtime: Runtime, config: ParallelismConfig) -> None:
    """Raise if replicas with these settings could not be replaced."""
    shards, there = config.size("dp_shard"), runtime.process.local_world_size
    refusals = [
        (config.size("dp_replicate") < 2, "one replica", "no other one can continue.", "Set dp_replicate_size=2."),
        (shards < 2, "FSDP and one process per replica", "nothing is sharded.", "Leave the FSDP plugin out (DDP)."),
        (
            there % shards != 0,
            f"dp_shard_size={shards} and {there} processes per machine",
            "a replica must be on one machine, whose launcher replaces it.",
            "Choose a dp_shard_size that divides the processes of a machine.",
        ),
    ]
    for applies, setting, reason, remedy in refusals:
        if applies:
            raise UnsupportedSettingError(f"--survive with {setting}", reason, remedy)
