"""Know where every process is, and say why they wait for each other."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch.distributed as dist

from ..config.environment import read_setting
from ..runtime.group.runtime import Runtime

if TYPE_CHECKING:
    from .hangs.watcher import Watcher

logger = logging.getLogger(__name__)

DEFAULT_SECONDS = 30.0
_running: Watcher | None = None


def watch(runtime: Runtime) -> None:
    """See that the open process group has one watcher; `ACCELERATE_HANG_SECONDS=0` does without.

    A group may outlive its runtime (`Runtime.forget`): the next one finds the watcher at work, and ends it with the
    group.
    """
    global _running
    if _running is not None and not _running.is_of_the_open_group():
        _running.end(quietly=True)
        _running = None
    if _running is None:
        _running = _begin(runtime)
    if _running is not None and _running.end not in runtime.farewells:
        runtime.farewells.append(_running.end)


def _begin(runtime: Runtime) -> Watcher | None:
    seconds = read_setting("hang_seconds")
    seconds = DEFAULT_SECONDS if seconds is None else seconds
    if seconds <= 0 or runtime.num_processes == 1 or not dist.is_initialized() or not runtime.is_of_this_process():
        return None
    from .hangs.watcher import Watcher

    try:
        return Watcher.begin(runtime.store("watch"), runtime.process_index, runtime.num_processes, seconds)
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        logger.debug("Hangs are not watched: the process group has no store that can be shared. (%s)", error)
        return None
