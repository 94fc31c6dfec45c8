"""Let this rank run alone for a while: its collectives return without communicating.

[Note: muted collectives] A `ProcessGroup` of torch hands a collective to the backend of the tensor's device. For a
while that backend is torch's `FakeProcessGroup`, which fills results with this rank's own data: right in shape and in
memory, and finite. So a rank can fail anywhere without leaving the others in a collective. The group objects stay the
same, because DDP, device meshes and the script hold them. Objects that one rank gives to all are the exception: what a
script receives from rank 0 cannot be invented, so this exchange is a real one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

_OBJECTS_OF_ONE_RANK = ("broadcast_object_list", "scatter_object_list")


class MutedGroups:
    """All process groups of this rank, which communicate or do not."""

    def __init__(self, apart: Collection[Any] = ()) -> None:
        groups: Any = dist.distributed_c10d._world.pg_map if dist.is_initialized() else ()
        self._backends = {
            (group, device): group._get_backend(device)
            for group in groups
            if all(group is not other for other in apart)
            for device in group._device_types
        }

    def mute(self) -> None:
        """Let collectives return without communicating."""
        from torch._C._distributed_c10d import FakeProcessGroup

        make: Any = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
        for group, device in self._backends:
            fake = make(group.rank(), group.size())
            group._register_backend(device, dist.ProcessGroup.BackendType.UNDEFINED, fake)

    def unmute(self) -> None:
        """Let collectives communicate again."""
        for (group, device), backend in self._backends.items():
            group._register_backend(device, _type_of(backend), backend)


@contextmanager
def collectives_muted(apart: Collection[Any] = ()) -> Iterator[None]:
    """Mute all collectives of this rank inside the block, except those of some groups.

    See [Note: muted collectives]. Groups that are opened inside the block are real.
    """
    groups = MutedGroups(apart)
    plain = {name: getattr(dist, name) for name in _OBJECTS_OF_ONE_RANK}
    for name, function in plain.items():
        _replace(name, _unmuted(function, groups))
    groups.mute()
    try:
        yield
    finally:
        groups.unmute()
        for name, function in plain.items():
            _replace(name, function)


def _unmuted(function: Callable[..., Any], groups: MutedGroups) -> Callable[..., Any]:
    @functools.wraps(function)
    def real(*args: Any, **kwargs: Any) -> Any:
        groups.unmute()
        try:
            return function(*args, **kwargs)
        finally:
            groups.mute()

    return real


def _replace(name: str, function: Callable[..., Any]) -> None:
    setattr(dist, name, function)
    setattr(dist.distributed_c10d, name, function)


def _type_of(backend: Any) -> torch.distributed.ProcessGroup.BackendType:
    """Return under which type torch has registered a backend: one that it does not know is a custom one."""
    types = dist.ProcessGroup.BackendType
    return getattr(types, str(backend.name()).upper(), types.CUSTOM)
