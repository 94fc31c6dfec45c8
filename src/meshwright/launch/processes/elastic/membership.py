"""The launchers' view of the members of a run: the store that the launcher of machine 0 hosts, and what it holds."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from ....errors import InvalidDataError
from ....runtime.group.stores import host_store
from ....runtime.membership.events import PREFIX, Event, Events, Note, connect, whole_replicas
from ....untrusted import printable, read_message
from ...console import notify

SECONDS_TO_ANSWER = 30.0
"""After this time without an answer of the store, the machine that hosts it is lost."""
_ADDRESS = "meshwright/membership"
Store: TypeAlias = Any  # torch's, whose stubs do not know all of its methods


class Membership:
    """The members of one attempt, and what launchers and processes tell each other about them.

    The keys, beside those of `Events`: `done/RANK` a process ended with exit code 0, `waiting/RANK` the number of the
    replacement that asks to join, `incarnation/RANK` the number of the one that may, `replacements` how many replicas
    were started again on all machines, `lost_ms` the milliseconds of training that changes of the members took,
    `cost/E` those of the change to epoch E, `folder` where the run's log is.
    """

    def __init__(self, rendezvous: Store, *, is_host: bool, host: str, replicas: int) -> None:
        self._server: Any = None  # ends with this object
        if is_host:
            seconds = timedelta(seconds=SECONDS_TO_ANSWER)
            self._server = host_store(host, 0, seconds)
            rendezvous.set(_ADDRESS, f"{host}:{self._server.port}")
        self.address: str = rendezvous.get(_ADDRESS).decode()
        self._store: Store = PrefixStore(PREFIX, self._server) if is_host else connect(self.address, SECONDS_TO_ANSWER)
        self.replicas = replicas
        self._events = Events(self._store, replicas, on_unreadable=self._say_unreadable if is_host else None)

    @staticmethod
    def _say_unreadable(reason: str) -> None:
        notify(f"{reason}: nobody has left or joined by it, and the run goes on. Another program wrote it.")

    def has_begun(self) -> bool:
        """Return whether training has begun, so that a process can be replaced."""
        return self._events.has_begun()

    def members(self) -> tuple[int, ...]:
        """Return the ranks that are members now."""
        return self._events.members(self._events.newest())

    def still_training(self) -> tuple[int, ...]:
        """Return the members whose processes have not ended with exit code 0."""
        return tuple(rank for rank in self.members() if not self._store.check([f"done/{rank}"]))

    def by_replica(self, ranks: Iterable[int]) -> list[tuple[int, ...]]:
        """Return the replicas that some ranks belong to, each with all of its ranks."""
        shards = self._events.shards()
        return [whole_replicas([first], shards) for first in sorted({rank // shards * shards for rank in ranks})]

    def remove(self, ranks: Iterable[int], reason: str) -> None:
        """Tell the others that members have left."""
        self._events.publish("left", ranks, reason)

    def mark_done(self, rank: int) -> None:
        """Note that the process of a rank ended with exit code 0."""
        self._store.set(f"done/{rank}", "1")

    def expect(self, rank: int, incarnation: int) -> None:
        """Say which process of a rank may join next; requests of earlier ones are void. Call it before `remove`."""
        self._store.set(f"incarnation/{rank}", str(incarnation))

    def count_replacements(self, replicas: int) -> None:
        """Count replicas that are started again."""
        self._store.add("replacements", replicas)

    def is_given_up(self, machine: int) -> bool:
        """Return whether the others go on without a machine."""
        return bool(self._store.check([f"lost/{machine}"]))

    def is_outdated(self, rank: int, incarnation: int) -> bool:
        """Return whether an earlier replacement than the present one has asked to join."""
        key = f"waiting/{rank}"
        return bool(self._store.check([key])) and read_message(self._store, key, int) < incarnation

    def why_removed(self, rank: int) -> str:
        """Return why a rank is no member any more."""
        numbers = range(self._events.newest(), 0, -1)
        newest = next(
            event for event in map(self._events.read, numbers) if event.kind == "left" and rank in event.ranks
        )
        return newest.reason

    def newest(self) -> int:
        """Return the number of events until now."""
        return self._events.newest()

    def event(self, number: int) -> tuple[Event, tuple[int, ...]]:
        """Return an event, and the members after it."""
        return self._events.read(number), self._events.members(number)

    def cost(self, epoch: int) -> float | None:
        """Return the seconds that training stood still for the change to an epoch; None if that is not known."""
        key = f"cost/{epoch}"
        try:
            return read_message(self._store, key, int) / 1000 if self._store.check([key]) else None
        except InvalidDataError:  # it is for views only
            return None

    def note(self, number: int) -> Note | None:
        """Return what a member reported about others; None if there is no such note yet."""
        key = f"note/{number}"
        try:
            return read_message(self._store, key, Note) if self._store.check([key]) else None
        except InvalidDataError as error:
            return Note(time=time.time(), kind="unreadable", ranks=(), reason=printable(str(error)))

    def folder(self) -> str | None:
        """Return the folder of the run's log, if there is one."""
        return self._store.get("folder").decode(errors="replace") if self._store.check(["folder"]) else None

    def totals(self) -> ReplacementTotals:
        """Return what all machines have counted until now."""
        return ReplacementTotals(
            replacements=self._store.add("replacements", 0), seconds=self._store.add("lost_ms", 0) / 1000
        )


@dataclass(frozen=True, kw_only=True)
class ReplacementTotals:
    """How many replicas were replaced, and the seconds in which training stood still for that."""

    replacements: int = 0
    seconds: float = 0.0

    def __add__(self, other: ReplacementTotals) -> ReplacementTotals:
        return ReplacementTotals(
            replacements=self.replacements + other.replacements, seconds=self.seconds + other.seconds
        )

    def sentence(self, of_seconds: float) -> str:
        """Say it, beside the length of the run."""
        count = "1 replacement" if self.replacements == 1 else f"{self.replacements} replacements"
        return f"{count}, {self.seconds:.1f} s lost of {_duration(of_seconds)}."


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s"
