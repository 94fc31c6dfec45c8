"""The events of a run in order: which ranks left or joined. Every process derives the same members from them.

[Note: events without gaps] Event k is the key `event/k`, written by compare_set: the first publisher gets the number.
A counter that is raised before the event is written would leave a gap when the publisher is killed in between, and all
readers would wait for that event. For the same reason a publisher also supersedes the agreements on earlier epochs, in
case that their publisher was killed before it could.

[Note: an event that cannot be read] Anybody who reaches the store can write into it. All readers take an event that is
no event for a group that broke: nobody has left or joined, and all agree once more, at its number. So the run goes on,
the numbers stay without gaps, and a member that has heard of it does not wait for one that has not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, Literal, TypeAlias

from ...errors import InvalidDataError
from ...untrusted import printable, read_message

Store: TypeAlias = Any  # torch's, whose stubs do not know all of its methods
Kind: TypeAlias = Literal["left", "joined", "broken"]

PREFIX = "membership"
RETRACTED = "another replica was lost while it joined"
"""Why a replica that was about to join has left again: its processes ask once more."""
SUPERSEDED = "superseded"
"""The value of `go/E` when another event came before epoch E was agreed on."""


def connect(address: str, seconds: float = 300.0) -> Store:
    """Connect to the launcher's store at `host:port`. Give every thread its own connection: waiting locks it."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    host, _, port = address.rpartition(":")
    return PrefixStore(PREFIX, TCPStore(host, int(port), timeout=timedelta(seconds=seconds), wait_for_workers=False))


@dataclass(frozen=True, kw_only=True)
class Note:
    """Something about members that changes nothing, for views of the run."""

    time: float
    kind: str
    ranks: tuple[int, ...]
    reason: str


def write_note(store: Store, kind: str, ranks: Iterable[int], text: str) -> None:
    """Tell the launcher a `Note`."""
    record, number = json.dumps(asdict(Note(time=time.time(), kind=kind, ranks=tuple(ranks), reason=text))), 1
    while store.compare_set(f"note/{number}", "", record).decode() != record:
        number += 1


@dataclass(frozen=True, kw_only=True)
class Event:
    """One change of the members, or a collective that broke."""

    kind: Kind
    ranks: tuple[int, ...]
    """Nominal ranks."""
    reason: str
    time: float


class Events:
    """The log of events. Epoch E is the state after event E; in epoch 0 all replicas are members."""

    def __init__(self, store: Store, replicas: int, on_unreadable: Callable[[str], object] | None = None) -> None:
        self.store = store
        self._on_unreadable = on_unreadable
        """Called with the reason; see [Note: an event that cannot be read]."""
        self._events: list[Event] = []
        self._replicas = replicas
        self._members: list[tuple[int, ...]] = [tuple(range(replicas))]
        self._superseded = 0
        """Agreements on epochs below were superseded by this object."""

    def publish(self, kind: Kind, ranks: Iterable[int], reason: str) -> int:
        """Append an event, and return its number, which is the new epoch."""
        number = self.newest() + 1
        while not self.publish_next(number, kind, ranks, reason):
            number += 1
        return number

    def publish_next(self, number: int, kind: Kind, ranks: Iterable[int], reason: str) -> bool:
        """Append an event if it is the one of this number; return whether it was."""
        event = Event(kind=kind, ranks=tuple(sorted(ranks)), reason=reason, time=time.time())
        text = json.dumps(asdict(event))
        if self.store.compare_set(f"event/{number}", "", text).decode() != text:
            return False
        self._supersede(number)
        return True

    def _supersede(self, number: int) -> None:
        for epoch in range(self._superseded, number):
            self.store.compare_set(f"go/{epoch}", "", SUPERSEDED)
        self._superseded = number

    def newest(self) -> int:
        """Return the number of events up to now, which is the newest epoch."""
        while self.store.check([f"event/{len(self._events) + 1}"]):
            self._read_next()
        return len(self._events)

    def read(self, number: int) -> Event:
        """Return event `number` (from 1), and wait for it if it is not there yet."""
        while len(self._events) < number:
            self._read_next()
        return self._events[number - 1]

    def members(self, epoch: int) -> tuple[int, ...]:
        """Return the nominal ranks that are members in an epoch, in order."""
        if epoch > 0:
            self.read(epoch)
        return self._members[epoch]

    def mark_begun(self) -> None:
        """Say that training has begun: from now on the launcher replaces a process that ends, instead of all."""
        self.store.add("begun", 1)  # unlike `set`, it waits for the store

    def tell_shards(self, shards: int) -> None:
        """Say of how many processes a replica consists: the launcher replaces all of them together."""
        self.store.set("shards", str(shards))

    def shards(self) -> int:
        """Return of how many processes a replica consists."""
        found = read_message(self.store, "shards", int) if self.store.check(["shards"]) else 1
        if found < 1 or self._replicas % found:
            raise InvalidDataError(f"shards in the store of the run is {found}, of {self._replicas} processes")
        return found

    def has_begun(self) -> bool:
        """Return whether training has begun."""
        return bool(self.store.check(["begun"]))

    def _read_next(self) -> None:
        event = self._event(len(self._events) + 1)
        members = set(self._members[-1])
        if event.kind == "left":
            members -= set(event.ranks)
        elif event.kind == "joined":
            members |= set(event.ranks)
        self._members.append(tuple(sorted(members)))
        self._events.append(event)

    def _event(self, number: int) -> Event:
        """Return an event of the store; see [Note: an event that cannot be read]."""
        try:
            event = read_message(self.store, f"event/{number}", Event)
            if not set(self._members[0]).issuperset(event.ranks):
                raise InvalidDataError(f"event/{number} in the store of the run names ranks that it does not have")
        except InvalidDataError as error:
            reason = printable(str(error))
            self._supersede(number)  # as its publisher would have
            if self._on_unreadable is not None:
                self._on_unreadable(reason)
            return Event(kind="broken", ranks=(), reason=reason, time=time.time())
        return replace(event, reason=printable(event.reason, 1000))


def whole_replicas(ranks: Iterable[int], shards: int) -> tuple[int, ...]:
    """Return all ranks of the replicas that some ranks belong to, where a replica has so many consecutive ranks."""
    replicas = sorted({rank // shards for rank in ranks})
    return tuple(rank for replica in replicas for rank in range(replica * shards, (replica + 1) * shards))
