"""Keep forked children from collecting the objects that they inherit."""

from __future__ import annotations

import functools
import gc
import os

# [Note: garbage of the parent]
# A forked child inherits garbage that its parent has not collected yet, such as the process group of an earlier
# training or the store of an earlier launch. Their destructors wait for a thread that does not exist after the fork: a
# child that collected them would hang or crash. That could happen at once, in the at-fork hooks of other libraries; so
# the collector is disabled from before the fork until the child has frozen what it inherited.


@functools.cache
def freeze_inherited_objects() -> None:
    """Keep children that are forked later from collecting what they inherit. See [Note: garbage of the parent]."""
    if hasattr(os, "register_at_fork"):
        pause = _CollectorPause()
        os.register_at_fork(before=pause.begin, after_in_parent=pause.end, after_in_child=pause.end_in_child)


class _CollectorPause:
    """Disable the garbage collector while any thread forks."""

    def __init__(self) -> None:
        self._forks = 0
        self._was_enabled = True

    def begin(self) -> None:
        self._forks += 1
        if self._forks == 1:
            self._was_enabled = gc.isenabled()
            gc.disable()

    def end(self) -> None:
        self._forks -= 1
        if self._forks == 0 and self._was_enabled:
            gc.enable()

    def end_in_child(self) -> None:
        self._forks = 1  # other threads and their forks exist in the parent only
        gc.freeze()
        self.end()
