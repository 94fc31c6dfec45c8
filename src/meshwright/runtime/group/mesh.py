"""The device mesh of a run, and the process groups along its axes."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...config.meshes import axis_with_view, build_mesh, world_group_options
from ...config.plugins.parallelism import AXES, EXPERT_AXES, VIEWS, ParallelismConfig
from .forks import hold_in_children
from .runtime import Runtime


class Mesh:
    """The device mesh, and this process's groups and coordinates in it."""

    def __init__(self, config: ParallelismConfig, device_mesh: DeviceMesh, experts: DeviceMesh | None = None) -> None:
        self.config = config
        self.device_mesh = device_mesh
        self._experts = experts
        self._axes = device_mesh.mesh_dim_names or ()
        hold_in_children(device_mesh)
        if experts is not None:
            hold_in_children(experts)
        # torch caches a flattened view in the mesh.
        with world_group_options():
            self._views = {view: self._flattened(view, members) for view, members in VIEWS.items()}
            self.sharding = self._sharding_mesh()
        """The mesh for FSDP2: replicate x shard, or shard alone; None where only layers are split."""

    @classmethod
    def of(cls, config: ParallelismConfig, runtime: Runtime) -> Mesh:
        """Return the mesh of these sizes; a second Accelerator reuses the existing one, with its groups."""
        sizes = tuple(config.fitted(runtime.num_processes).size(axis) for axis in AXES)
        if sizes not in runtime.meshes:
            needed = set(config.active_mesh_dims)
            if config.dp_replicate_enabled and not config.dp_shard_cp_dim_names:
                needed.add("dp_shard")  # FSDP2, which averages the replicas, needs an axis to shard over
            axes = [axis for axis in AXES if axis in needed]
            runtime.meshes[sizes] = build_mesh(axes, [config.size(axis) for axis in axes], runtime.device.type, VIEWS)
        config.device_mesh = runtime.meshes[sizes]
        if not config.ep_enabled:
            return cls(config, runtime.meshes[sizes])
        views = (*sizes, config.size("ep"))
        if views not in runtime.meshes:
            runtime.meshes[views] = build_mesh(
                EXPERT_AXES, config.expert_sizes, runtime.device.type, {"ep_shard_ep": EXPERT_AXES[1:]}
            )
        return cls(config, runtime.meshes[sizes], runtime.meshes[views])

    def _flattened(self, view: str, members: tuple[str, ...]) -> DeviceMesh | None:
        names = tuple(axis for axis in self._axes if axis in members)
        return self.device_mesh[names]._flatten(view) if names else None

    def _sharding_mesh(self) -> DeviceMesh | None:
        shards = [axis for axis in self._axes if axis in VIEWS["dp_shard_cp"]]
        if not shards:
            return None
        if self.config.tp_enabled:  # one collective instead of two for a norm over both
            self._flattened("dp_shard_cp_tp", (*shards, "tp"))
        replicas = ("dp_replicate",) if self.config.dp_replicate_enabled else ()
        if len(shards) == 1:
            names = (*replicas, shards[0])
            return self.device_mesh[names]
        flattened = self._views["dp_shard_cp"]
        assert flattened is not None
        return axis_with_view(self.device_mesh, "dp_replicate", flattened) if replicas else flattened

    def size(self, axis: str) -> int:
        """Return the number of processes along an axis."""
        return self.config.size(axis)

    def axis(self, axis: str) -> DeviceMesh:
        """Return the submesh of one axis that contains this process."""
        return self.device_mesh[axis]

    @property
    def experts(self) -> DeviceMesh:
        """The mesh of the experts: the same processes by other axes, `EXPERT_AXES`."""
        assert self._experts is not None  # there is one where ep_size > 1
        return self._experts

    @property
    def num_data_ranks(self) -> int:
        """Return the number of processes that see different samples."""
        return self.config.data_parallel_size

    @property
    def data_rank(self) -> int:
        """Return this process's rank among those that see different samples."""
        view = self._views["dp"]
        return 0 if view is None else view.get_local_rank()

    @property
    def data_group(self) -> Any:
        """The group of processes that see different samples: None where it is the world."""
        return self._group("dp")

    @property
    def num_token_ranks(self) -> int:
        """Return the number of processes that see different tokens."""
        return self.config.data_parallel_size * self.size("cp") * self.size("sp")

    @property
    def token_group(self) -> Any:
        """The group of processes with different tokens, which averages gradients: None where it is the world."""
        return self._group("dp_cp")

    def _group(self, view: str) -> Any:
        mesh = self._views[view]
        return None if mesh is None or mesh.size() == dist.get_world_size() else mesh.get_group()
