"""The process groups of a replica that is spread over several processes, in a run whose replicas come and go.

[Note: a group that stays] The default group is destroyed and formed again whenever the members of the run change, and
torch destroys all other groups with it. The group inside of a replica must stay: FSDP2 keeps it in its parameters, and
to connect again is expensive. Such a group depends on the default group only by the tables in which torch finds groups:
`_world`, which also says which global ranks are in a group, and the names that functional collectives use. So it is
taken out of the first before the default group is destroyed, and put back into both, with its new ranks, after the
next default group was formed. Nothing uses it in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..membership.member import Member

_c10d: Any = dist.distributed_c10d
_world: Any = _c10d._world


class ReplicaGroups:
    """The groups of this process: one inside of its replica, and one with its counterparts in the other replicas.

    A replica has `member.shards` processes with consecutive nominal ranks. The counterparts of a process are those
    at the same place of the other replicas; they hold the same shards.
    """

    def __init__(self, member: Member, backend: str, timeout: timedelta) -> None:
        self._member = member
        self._backend = backend
        self._timeout = timeout
        self._entries: dict[str, Any] | None = None  # of the group inside, while it is taken out
        self.counterparts: Any = None
        """The group of the present counterparts; None for a replica that has not joined."""
        present = member.members if member.has_joined else member.replica
        store = dist.PrefixStore("inside", member.store_of_replica())  # type: ignore[attr-defined]
        self.inside: Any = self._open(f"replica/{member.replica[0]}", store, _places(member.replica, present), timeout)
        """The group inside of this replica."""
        if member.has_joined:
            self.open_counterparts(present, timeout)

    def _open(self, name: str, store: Any, ranks: list[int], timeout: timedelta) -> Any:
        """Open a group of these ranks. Other ranks take no part in it, unlike with `new_group`."""
        place = ranks.index(dist.get_rank())
        group, _ = _c10d._new_process_group_helper(
            len(ranks), place, ranks, self._backend, store, name, timeout=timeout, group_desc=name
        )
        _world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
        _c10d._set_pg_timeout(self._timeout, group)
        return group

    def open_counterparts(self, present: Sequence[int], timeout: timedelta) -> None:
        """Open the group of the counterparts among the members; it is destroyed with the default group."""
        member = self._member
        ranks = _places(member.counterparts(present), present)
        self.counterparts = self._open(
            f"counterparts/{member.rank % member.shards}", member.store_of_epoch(), ranks, timeout
        )

    def take_out(self) -> None:
        """Keep the group inside of the replica from being destroyed; see [Note: a group that stays]."""
        group = self.inside
        self._entries = {
            name: getattr(_world, name).pop(group)
            for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag")
            if group in getattr(_world, name)
        }
        for groups in _world.tags_to_pg.values():
            if group in groups:
                groups.remove(group)
        self.counterparts = None

    def put_back(self, present: Sequence[int]) -> None:
        """Let torch find the group inside of the replica again, under the default group of these members."""
        group = self.inside
        assert self._entries is not None
        ranks = _places(self._member.replica, present)
        self._entries["pg_group_ranks"] = {rank: place for place, rank in enumerate(ranks)}
        for name, entry in self._entries.items():
            getattr(_world, name)[group] = entry
        if (tag := self._entries.get("pg_to_tag")) is not None:
            _world.tags_to_pg.setdefault(tag, []).append(group)
        _c10d._register_process_group(group.group_name, group)
        self._entries = None


def _places(ranks: Sequence[int], present: Sequence[int]) -> list[int]:
    """Return the ranks in the default group of the present members for nominal ranks."""
    return [present.index(rank) for rank in ranks]
