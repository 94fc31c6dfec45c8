"""The groups of a mesh have the options of the world group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.checkpoint.group import CheckpointGroup
from meshwright.config.meshes import build_mesh
from meshwright.config.plugins.handlers import InitProcessGroupKwargs
from meshwright.config.plugins.parallelism import ParallelismConfig
from meshwright.runtime.group.runtime import Runtime
from tests.ranks import ranks
from tests.simulated_accelerator import run_on_a_simulated_accelerator

OURS = timedelta(minutes=77)


def timeout_of(group: Any) -> timedelta:
    timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return timeout


def timeouts_of_a_mesh(device_type: str) -> list[timedelta]:
    """Return the timeouts of the groups along two axes, which work."""
    mesh = ParallelismConfig(dp_shard_size=2, tp_size=2).build_device_mesh(device_type)
    groups = [mesh.get_group(axis) for axis in ("tp", "dp_shard")]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    return [timeout_of(group) for group in groups]


@ranks(4)
def test_the_users_timeout_reaches_the_groups_of_a_mesh_and_of_checkpoints() -> None:
    default = dist.distributed_c10d.default_pg_timeout
    runtime = Runtime.start(init_handler=InitProcessGroupKwargs(timeout=OURS))
    assert timeouts_of_a_mesh("cpu") == [OURS, OURS]
    assert timeout_of(CheckpointGroup.of_all_ranks(runtime, on_each_node=False).process_group) == OURS
    assert timeout_of(dist.new_group()) == default, "groups that others make keep torch's default"


def mesh_of_a_group_bound_to_a_device() -> list[timedelta]:
    dist.init_process_group("cpu:gloo,gpu:gloo", timeout=OURS, device_id=torch.device("gpu:0"))
    world: Any = dist.group.WORLD
    timeouts = timeouts_of_a_mesh("gpu")
    assert world.bound_device_id == torch.device("gpu:0"), "it is bound again"
    dist.destroy_process_group()
    return timeouts


def test_groups_bound_to_a_simulated_accelerator_have_meshes_in_every_world_of_a_process() -> None:
    for _ in range(2):
        for timeouts in run_on_a_simulated_accelerator(mesh_of_a_group_bound_to_a_device, world_size=4):
            assert timeouts == [OURS, OURS]


@ranks(1)
def test_flattened_axes_are_asked_for_by_a_list() -> None:
    """Tests of other libraries put a mesh in place of torch's that compares what it is indexed with."""
    asked: list[Any] = []
    real = DeviceMesh.__getitem__

    def noting(mesh: DeviceMesh, names: Any) -> DeviceMesh:
        asked.append(names)
        return real(mesh, names)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(DeviceMesh, "__getitem__", noting)
        build_mesh(["dp_shard"], [1], "cpu", {"dp": ["dp_replicate", "dp_shard"]})
    assert asked[0] == ["dp_shard"]
