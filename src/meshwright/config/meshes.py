"""Build device meshes in the same way with every supported version of torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_DEFAULTS = ("default_pg_timeout", "default_pg_nccl_timeout")


def build_mesh(
    axes: Sequence[str], sizes: Sequence[int], device_type: str, views: Mapping[str, Sequence[str]]
) -> DeviceMesh:
    """Build a mesh of all processes with these axes, and flattened views of some of them."""
    from torch.distributed.device_mesh import init_device_mesh

    with world_group_options():
        mesh = init_device_mesh(device_type, tuple(sizes), mesh_dim_names=tuple(axes))
        for view, members in views.items():
            names: Any = [axis for axis in axes if axis in members]  # a list, which simulated meshes of tests expect
            if names:
                mesh[names]._flatten(view)
    return mesh


def axis_with_view(mesh: DeviceMesh, axis: str, view: DeviceMesh) -> DeviceMesh:
    """Return the submesh of an axis and a flattened view."""
    from torch.distributed.device_mesh import DeviceMesh

    concatenate: Any = getattr(DeviceMesh, "_concatenate", None)
    if concatenate is None:  # torch 2.9 takes names of views and of axes together
        names = (axis, *(view.mesh_dim_names or ()))
        return mesh[names]
    joined: DeviceMesh = concatenate([mesh[axis], view])
    return joined


@contextmanager
def world_group_options() -> Iterator[None]:
    """Create the groups of a mesh with the timeout of the world group, and without splitting it.

    torch uses its default timeout instead. It splits a world group that is bound to a device, together with its gloo
    backend: torch 2.9 refuses that, and versions up to 2.13 can crash.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        yield
        return
    c10d: Any = dist.distributed_c10d
    world = c10d._get_default_group()
    bound, defaults = world.bound_device_id, {name: getattr(c10d, name) for name in _DEFAULTS}
    with suppress(AttributeError, RuntimeError):  # a backend without readable options
        timeout = world._get_backend(bound or world._device_types[0]).options._timeout
        for name in _DEFAULTS:
            setattr(c10d, name, timeout)
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound
        for name, timeout in defaults.items():
            setattr(c10d, name, timeout)


MESH_CACHES = (
    ("torch._C", "_clear_DTensor_sharding_propagator_cache"),
    ("torch.distributed.tensor", "DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear"),
    ("torch.distributed.tensor._collective_utils", "MeshTopoInfo.build_from_mesh.cache_clear"),
    ("torch.distributed.tensor._redistribute", "_gen_transform_infos.cache_clear"),
    ("torch.distributed.tensor._redistribute", "clear_redistribute_planner_cache"),
    ("torch.distributed.tensor._sharding_prop", "ShardingPropagator._propagate_tensor_meta.cache_clear"),  # torch 2.9
    ("torch.distributed.tensor._sharding_prop", "ShardingPropagator._propagate_tensor_meta_cached.cache_clear"),
    ("torch.distributed.tensor.experimental._attention", "_replaced_functions.clear"),  # torch 2.9
    ("torch.distributed.tensor.experimental._context_parallel._attention", "_replaced_functions.clear"),
)
"""Modules of torch whose caches keep meshes, and what clears them. All are private, and no version of torch has all."""


def clear_mesh_caches() -> None:
    """Clear torch's caches for meshes whose groups are closed.

    A new mesh of the same shape compares equal. A cached mesh keeps its groups, and gloo's threads with them.
    """
    for module, path in MESH_CACHES:
        with suppress(AttributeError):  # not imported, or not in this version of torch
            attrgetter(path)(sys.modules.get(module))()
