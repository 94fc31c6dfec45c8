"""Keep forked children from freeing the objects that they inherit."""

from __future__ import annotations

import functools
import gc
import os
from typing import Any
from weakref import WeakValueDictionary

# [Note: garbage of the parent]
# A forked child inherits garbage that its parent has not collected yet, such as the process group of an earlier
# training or the store of an earlier launch. Their destructors wait for a thread that does not exist after the fork: a
# child that collected them would hang or crash. That could happen at once, in the at-fork hooks of other libraries; so
# the collector is disabled from before the fork until the child has frozen what it inherited.
#
# Reference counts free objects too. Python drops the states of all other threads in the child, before any at-fork hook
# runs there, and DTensor's caches are local to a thread: one that autograd keeps for a device may have the last
# reference to a mesh that was closed. Meshes are therefore referenced before the fork, and never released by the child.

_meshes: WeakValueDictionary[int, Any] = WeakValueDictionary()
_inherited: list[Any] = []
"""What this process inherited, and never releases."""


def hold_in_children(mesh: Any) -> None:
    """Keep children that are forked later from freeing this mesh, and its process groups."""
    _meshes[id(mesh)] = mesh


@functools.cache
def freeze_inherited_objects() -> None:
    """Keep children that are forked later from freeing what they inherit. See [Note: garbage of the parent]."""
    if hasattr(os, "register_at_fork"):
        pause = _CollectorPause()
        os.register_at_fork(before=pause.begin, after_in_parent=pause.end, after_in_child=pause.end_in_child)


class _CollectorPause:
    """Disable the garbage collector, and hold meshes, while any thread forks."""

    def __init__(self) -> None:
        self._forks = 0
        self._was_enabled = True
        self._held: list[Any] = []

    def begin(self) -> None:
        self._forks += 1
        if self._forks == 1:
            self._was_enabled = gc.isenabled()
            gc.disable()
        self._held += (mesh for reference in _meshes.valuerefs() if (mesh := reference()) is not None)

    def end(self) -> None:
        self._forks -= 1
        if self._forks == 0:
            if self._was_enabled:
                gc.enable()
            self._held = []  # last: another thread may fork while process groups are freed

    def end_in_child(self) -> None:
        self._forks = 0  # other threads and their forks exist in the parent only
        _inherited.extend(self._held)
        self._held = []
        gc.freeze()
        if self._was_enabled:
            gc.enable()
