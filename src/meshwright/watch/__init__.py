"""Detect hangs and stragglers: where every process is, and why they wait for each other."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..config.environment import read_setting

if TYPE_CHECKING:
    from ..runtime.group.runtime import Runtime
    from ..runtime.membership.member import Member
    from .hangs.members import MemberWatcher
    from .hangs.watcher import Watcher

logger = logging.getLogger(__name__)

DEFAULT_SECONDS = 30.0
_running: Watcher | None = None
_of_member: MemberWatcher | None = None


def watch(runtime: Runtime) -> None:
    """Ensure that the current process group has one watcher; `MESHWRIGHT_HANG_SECONDS=0` disables it.

    A process group may outlive its runtime (`Runtime.detach`). The next runtime reuses the watcher, and stops it with
    the group.
    """
    global _running
    if runtime.member is not None:
        _watch_member(runtime, runtime.member)
        return
    if _running is not None and not _running.watches_open_group():
        _running.stop(announce=False)
        _running = None
    if _running is None:
        _running = _start(runtime)
    if _running is not None and _running.stop not in runtime.shutdown_hooks:
        runtime.shutdown_hooks.append(_running.stop)


def _watch_member(runtime: Runtime, member: Member) -> None:
    """Ensure that a process whose peers change has one watcher, which outlives its process groups."""
    global _of_member
    if _of_member is None and _seconds() > 0:
        from .hangs.members import MemberWatcher

        _of_member = MemberWatcher(member, _seconds(), read_setting("replace_hung_after"), runtime.device)
        runtime.shutdown_hooks.append(_of_member.stop)


def _seconds() -> float:
    seconds = read_setting("hang_seconds")
    return DEFAULT_SECONDS if seconds is None else float(seconds)


def _start(runtime: Runtime) -> Watcher | None:
    import torch.distributed as dist  # commands that only read what was logged start without torch

    seconds = _seconds()
    if seconds <= 0 or runtime.num_processes == 1 or not dist.is_initialized() or not runtime.belongs_to_this_process():
        return None
    from .hangs.watcher import Watcher

    try:
        return Watcher.start(
            runtime.store("watch"), runtime.process_index, runtime.num_processes, seconds, runtime.device
        )
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        logger.debug("Hangs are not watched: the process group has no store that can be shared. (%s)", error)
        return None
