"""The ranks that make one checkpoint, and the collectives by which they agree apart from those of training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from ..runtime.group.runtime import Runtime
from ..runtime.membership.member import MembershipChanged

T = TypeVar("T")


class LostProcessError(RuntimeError):
    """Report that a process that took part in a checkpoint is gone.

    Another rank failed or was killed during the save. The draft is not committed, and the last checkpoint stays. Look
    for the failure of that rank.
    """


@dataclass(frozen=True, kw_only=True)
class CheckpointGroup:
    """One rank of the group that makes a checkpoint."""

    rank: int
    world_size: int
    """The number of ranks that make the checkpoint: all of the run, or one that saves for all."""
    num_processes: int
    """The number of processes of the run."""
    is_coordinator: bool
    """This rank writes the files that all ranks have in common, and commits."""
    on_each_node: bool = False
    """Each host keeps its own checkpoint on a local disk."""
    process_group: Any = None

    @classmethod
    def of_all_ranks(cls, runtime: Runtime, *, on_each_node: bool) -> CheckpointGroup:
        """Create a group of all ranks.

        It has its own process group, so that a save in the background does not mix with collectives of training.
        Members that come and go use the group of the moment, and save in the foreground.
        """
        process_group = None
        if runtime.num_processes > 1 and runtime.member is None:
            default = dist.distributed_c10d.default_pg_timeout
            process_group = dist.new_group(
                backend="gloo", timeout=max(default, runtime.init_handler.timeout or default)
            )
        return cls(
            rank=runtime.process_index,
            world_size=runtime.num_processes,
            num_processes=runtime.num_processes,
            is_coordinator=runtime.is_local_main_process if on_each_node else runtime.is_main_process,
            on_each_node=on_each_node,
            process_group=process_group,
        )

    @classmethod
    def of_one_rank(cls, runtime: Runtime, *, on_each_node: bool) -> CheckpointGroup:
        """Create a group of this rank alone, which saves for all. See [Note: who commits] in supplements.py."""
        return cls(
            rank=runtime.process_index,
            world_size=1,
            num_processes=runtime.num_processes,
            is_coordinator=True,
            on_each_node=on_each_node,
        )

    def gather(self, item: T) -> list[T]:
        """Return the items of all ranks, in the order of ranks."""
        if self.world_size == 1:
            return [item]
        items: list[Any] = [None] * self.world_size
        with _reporting_lost_process():
            dist.all_gather_object(items, item, group=self.process_group)
        return items

    def broadcast(self, item: T | None) -> T:
        """Return the item of rank 0."""
        if self.world_size == 1:
            return item  # type: ignore[return-value]
        items_of_rank_0 = [item]
        with _reporting_lost_process():
            dist.broadcast_object_list(items_of_rank_0, src=0, group=self.process_group)
        return items_of_rank_0[0]  # type: ignore[return-value]


@contextmanager
def _reporting_lost_process() -> Iterator[None]:
    """Convert an error of the collective to `LostProcessError`; its own message names a line of C++ source."""
    try:
        yield
    except MembershipChanged:
        raise
    except RuntimeError as error:
        reason = str(error).partition("] ")[2].splitlines()[:1] or [str(error)]
        raise LostProcessError(
            f"Another process ended, or cannot be reached, while this one waited for it at a checkpoint ({reason[0]}). "
            "Checkpoints that were committed before are untouched."
        ) from error
