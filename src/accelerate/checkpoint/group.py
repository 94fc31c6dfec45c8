"""The processes that make one checkpoint: who leads, and how they agree without touching training's collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from ..runtime.group.runtime import Runtime

T = TypeVar("T")


class LostProcessError(RuntimeError):
    """Report that a process that took part in a checkpoint is gone.

    Another rank failed or was killed during the save. The draft is not committed, and the last checkpoint stays. Look
    for the failure of that rank.
    """


@dataclass(frozen=True, kw_only=True)
class Crew:
    """One process among those that save together."""

    rank: int
    world_size: int
    """How many processes make the checkpoint: all of the run, or the one that saves for all."""
    num_processes: int
    """How many processes the run has."""
    leads: bool
    """It writes what all processes have in common, and commits."""
    on_each_node: bool = False
    """Every host keeps a checkpoint of its own, on a disk that the others do not see."""
    group: Any = None

    @classmethod
    def assemble(cls, runtime: Runtime, *, on_each_node: bool) -> Crew:
        """Gather the processes of a run, in a group of their own: a background save must not meet training's calls."""
        group = None
        if runtime.num_processes > 1:
            default = dist.distributed_c10d.default_pg_timeout
            group = dist.new_group(backend="gloo", timeout=max(default, runtime.init_handler.timeout or default))
        return cls(
            rank=runtime.process_index,
            world_size=runtime.num_processes,
            num_processes=runtime.num_processes,
            leads=runtime.is_local_main_process if on_each_node else runtime.is_main_process,
            on_each_node=on_each_node,
            group=group,
        )

    @classmethod
    def alone(cls, runtime: Runtime, *, on_each_node: bool) -> Crew:
        """Return the one process that saves for all. See [Note: who commits] in supplements.py."""
        return cls(
            rank=runtime.process_index,
            world_size=1,
            num_processes=runtime.num_processes,
            leads=True,
            on_each_node=on_each_node,
        )

    def gather(self, item: T) -> list[T]:
        """Return every process's item, by rank."""
        if self.world_size == 1:
            return [item]
        items: list[Any] = [None] * self.world_size
        with _naming_who_is_gone():
            dist.all_gather_object(items, item, group=self.group)
        return items

    def from_leader(self, item: T | None) -> T:
        """Return the main process's item."""
        if self.world_size == 1:
            return item  # type: ignore[return-value]
        box = [item]
        with _naming_who_is_gone():
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]  # type: ignore[return-value]


@contextmanager
def _naming_who_is_gone() -> Iterator[None]:
    """Say in words that another process died; the library below names a line of its own source."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("] ")[2].splitlines()[:1] or [str(error)]
        raise LostProcessError(
            f"Another process ended, or cannot be reached, while this one waited for it at a checkpoint ({reason[0]}). "
            "Checkpoints that were committed before are untouched."
        ) from error
