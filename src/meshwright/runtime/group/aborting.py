"""Abort process groups whose collectives may never complete.

[Note: aborting] On an accelerator a collective is a kernel. If a peer is lost, it runs for ever, and every wait for the
device behind it, too. Only an abort from another thread ends it: the outputs hold anything then, and no error tells.
An abort may itself wait for the kernels of other groups on the same device, so all groups are aborted in one call of
the backend (`_group_start` ... `_group_end`, as torch does it); one after another they can wait for each other. A group
that was aborted can be destroyed at once; destroying one with a pending collective may wait for ever. Gloo's groups are
left out: their abort ends no wait, and may block the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist


def open_groups() -> list[Any]:
    """Return the process groups of this process."""
    return list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else []


def can_abort(group: Any) -> bool:
    """Return whether all collectives of a group on accelerators can be aborted, together with those of other groups."""
    return all(hasattr(backend, "_group_start") for backend in _backends_on_devices(group))


def abort(groups: Iterable[Any]) -> None:
    """End all collectives of these groups on accelerators. See [Note: aborting]."""
    backends = [backend for group in groups for backend in _backends_on_devices(group)]
    together = [backend for backend in backends if hasattr(backend, "_group_start")]
    if together:
        together[0]._group_start()
    try:
        for backend in backends:
            backend.abort()
    finally:
        if together:
            together[0]._group_end()


def _backends_on_devices(group: Any) -> Sequence[Any]:
    """Return the backends of a group but those of the host."""
    found = {}
    for device in group._device_types:
        backend = group._get_backend(device)
        if backend.name() != "gloo":
            found[id(backend)] = backend
    return list(found.values())
