"""What a forked child may do with the objects it inherits: everything but collect them."""

from __future__ import annotations

import functools
import gc
import os

# [Note: garbage of the parent]
# A forked child inherits what its parent has not collected yet, such as the process group of an earlier training or
# the store of an earlier launch. Their destructors wait for a thread that did not survive the fork: a child that
# collected them would hang, or end by a segmentation fault. It could do so as soon as it exists, in what other
# libraries do after a fork; so the collector rests from before the fork until the child has set its inheritance aside.


@functools.cache
def keep_inheritances() -> None:
    """Let children that are forked from now on never collect what they inherit. See [Note: garbage of the parent]."""
    if hasattr(os, "register_at_fork"):
        rest = _Rest()
        os.register_at_fork(before=rest.begin, after_in_parent=rest.end, after_in_child=rest.end_in_child)


class _Rest:
    """The collector's, while any thread forks."""

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
        self._forks = 1  # the other threads, and their forks, are the parent's
        gc.freeze()
        self.end()
