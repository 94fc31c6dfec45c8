"""One process as a member of a run whose replicas come and go."""

from __future__ import annotations

import atexit
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ...config.environment import INCARNATION, MEMBERSHIP_STORE, read
from ...errors import InvalidDataError
from ...untrusted import build, parse_json, printable
from . import statuses
from .events import SUPERSEDED, Events, connect, whole_replicas
from .heartbeat import (
    REQUESTS_PER_SECOND_OF_WAITERS,
    SECONDS_BETWEEN_HEARTBEATS,
    SECONDS_WITHOUT_HEARTBEAT,
    Heartbeats,
    pause,
    watched_members,
)

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_BETWEEN_POLLS = 0.01
SECONDS_TO_HEAR_OF_A_LOSS = 5.0
"""How long a member with a failed collective waits to hear who was lost, before it reports the group itself."""
SECONDS_TO_BE_KILLED = 30.0
"""How long a member that was expelled waits for its launcher to end it."""
_HEARTBEATS = "heartbeat"  # the counters of members in the store
_FOREVER = timedelta(days=30).total_seconds()
_SECONDS_BETWEEN_QUERIES = 0.0005
_wait_inside_torch = dist.Work.wait

# [Note: membership]
# Members are named by their nominal rank. Every change is an event in the launcher's store, numbered by a counter, so
# that all members fold the same list into the same members: epoch E is the state after E events. Members that find
# their collective failed, or hear of a loss, synchronize at the newest epoch: each writes its status, the last one to
# arrive writes the summary, and all wait for that one key. An event that comes meanwhile replaces the summary by
# "superseded", and they synchronize again at the next epoch. This takes a constant number of messages per member.
#
# [Note: silent members]
# A process that is stopped, or on a machine that cannot be reached, does not end. The thread of every member therefore
# counts up once per second in the store; it does so while the script computes, evaluates or waits. Members that wait in
# a collective or an agreement look at the counters of others. The launcher kills a process whose rank was taken for
# lost, so that it cannot come back: a slow member is waited for, a silent one is not.
#
# [Note: leaving a collective]
# A member waits for a collective in slices, and between them it looks for losses. Torch's own functions (those of
# objects, or a script's) wait without end inside the library, and gloo's abort() does not free them. Within
# `interrupting_collectives` they wait as members do: the wait of every collective is replaced. It is used around
# collectives whose result is needed at once, so that it costs no overlap on backends that wait in a stream.
#
# [Note: leaving a collective of a device]
# There, `wait(timeout)` is no slice: the time counts from the start of the collective, and afterwards the communicator
# is aborted. So members ask whether it has completed. A collective that is not asynchronous gives nothing to ask; the
# host meets it where it next waits for the device, and nothing in that thread ends this wait. The thread that follows
# the events therefore aborts the groups as soon as it hears of a loss, and looks at the heartbeats while the other one
# is in such a block. What an aborted collective leaves is no result: everything that was completed by then raises.


class MembershipChanged(RuntimeError):
    """Report that a member was lost while this process waited for a collective."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What the members of an epoch agreed on."""

    epoch: int
    previous: int
    """The epoch that this process was in before."""
    members: tuple[int, ...]
    statuses: Mapping[int, Any]
    """The status of every member."""


class Member:
    """Represent this process among the replicas of the run; see [Note: membership]."""

    def __init__(
        self, address: str, rank: int, replicas: int, incarnation: int, device: torch.device | None = None
    ) -> None:
        self.address = address
        self.device = device
        """The device of this process if it has streams, where collectives complete later; else None."""
        self.release: Callable[[], None] | None = None
        """What ends the waits for members that were lost: it aborts the groups of this epoch on devices."""
        self.rank = rank
        """The nominal rank, which a replacement inherits."""
        self.replicas = replicas
        """The number of processes that the run was started with: each is a replica, or a shard of one."""
        self.shards = 1
        """The number of processes of a replica. Their nominal ranks are consecutive; they leave and join together."""
        self.incarnation = incarnation
        self.epoch = 0
        self.members = tuple(range(replicas))
        self.has_joined = incarnation == 0
        self.waiting_since: float | None = None
        """Since when this member waits for others, by `now`; None if it does not."""
        self.store = self.connect()
        """The launcher's store, under the keys of membership."""
        self.events = Events(self.store, replicas)
        self._events_lock = threading.Lock()
        self._heard = 0  # the number of the newest event that this process has taken note of
        self._asked_for_requests = 0.0
        self._newest_loss = 0  # the number of the newest event that ends a process group
        self._released = -1  # the epoch whose groups were aborted
        self._is_in_block = False
        self._lost: dict[int, int] = {}  # the number of the newest event by which a rank left
        self._is_closed = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="membership", daemon=True)
        self._listener.start()
        atexit.register(self.close)

    @classmethod
    def from_environment(cls, rank: int, replicas: int, device: torch.device | None = None) -> Member | None:
        """Return the member that the launcher started; None without `--survive`."""
        address = read(MEMBERSHIP_STORE)
        return None if address is None else cls(address, rank, replicas, int(read(INCARNATION) or 0), device)

    def connect(self) -> Any:
        """Return another connection to the launcher's store, for another thread."""
        return connect(self.address, _FOREVER)

    def store_of_epoch(self) -> Any:
        """Return the store of this epoch's process group."""
        return dist.PrefixStore(f"epoch/{self.epoch}", self.store)  # type: ignore[attr-defined]

    def store_of_replica(self) -> Any:
        """Return the store of the processes that were started together as one replica."""
        return dist.PrefixStore(f"replica/{self.replica[0]}/{self.incarnation}", self.store)  # type: ignore[attr-defined]

    # --- replicas of several processes ------------------------------------------------------------------------------

    def spread_replicas(self, shards: int) -> None:
        """Let every replica consist of so many processes, and tell the launchers."""
        self.shards = shards
        self.events.tell_shards(shards)

    @property
    def replica(self) -> tuple[int, ...]:
        """The nominal ranks of this process's replica."""
        return self.whole_replicas([self.rank])

    def whole_replicas(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return all ranks of the replicas that these belong to."""
        return whole_replicas(ranks, self.shards)

    def counterparts(self, ranks: Iterable[int] | None = None) -> list[int]:
        """Return those of some ranks, or of the members, that are at the place of this process in their replicas."""
        return [rank for rank in (self.members if ranks is None else ranks) if (rank - self.rank) % self.shards == 0]

    def count_replicas(self, processes: int) -> int:
        """Return how many replicas so many processes are."""
        return processes // self.shards

    # --- waiting ----------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Follow the events. It polls: a thread that waits inside the store would abort the interpreter at its end."""
        try:
            events = Events(self.connect(), self.replicas)
            heartbeats, sent = Heartbeats(events.store, _HEARTBEATS, ()), now()
            monitor: HeartbeatMonitor | None = None
            while not self._is_closed.wait(pause(SECONDS_BETWEEN_LOOKS, self.replicas)):
                if now() - sent >= SECONDS_BETWEEN_HEARTBEATS:
                    sent = now()
                    heartbeats.send(self.rank)
                self._read_events(events)
                monitor = self._look_from_thread(monitor, events)
                self._release_waits()
        except RuntimeError:  # the launcher is gone
            return

    def _look_from_thread(self, monitor: HeartbeatMonitor | None, events: Events) -> HeartbeatMonitor | None:
        """Look at the others for a thread that may wait inside of a device."""
        if self.device is None or not self._is_in_block:
            return None
        if monitor is None:
            return HeartbeatMonitor(self, self.members, events)
        monitor.look()
        return monitor

    def _release_waits(self) -> None:
        """End the waits for a member that was lost, once per epoch."""
        release, epoch = self.release, self.epoch  # in this order: a group of the next epoch has nothing to do with it
        if release is None or self._newest_loss <= epoch or self._released == epoch:
            return
        self._released = epoch
        try:
            release()
        except RuntimeError as error:  # the thread that leaves the groups tries again
            logger.debug("Rank %d could not abort its groups: %s", self.rank, error)

    def _read_events(self, events: Events) -> None:
        """Take note of new events; `events` is that of the calling thread."""
        newest = events.newest()
        with self._events_lock:
            for number in range(self._heard + 1, newest + 1):
                event, before = events.read(number), events.members(number - 1)
                if event.kind == "broken" or set(event.ranks) & set(before):
                    self._newest_loss = number
                    self._lost |= dict.fromkeys(event.ranks, number)
                self._heard = number

    def close(self) -> None:
        """End the thread that follows the events."""
        self._is_closed.set()
        self._listener.join()

    @property
    def has_lost_one(self) -> bool:
        """Whether a member of this epoch was lost."""
        return self._newest_loss > self.epoch

    def has_lost(self, rank: int) -> bool:
        """Return whether a member of this epoch, given by its nominal rank, was lost."""
        return self._lost.get(rank, 0) > self.epoch

    def wait(self, work: Any) -> None:
        """Wait for a collective; raise its error, or `MembershipChanged` if a member was lost meanwhile."""
        heartbeats: HeartbeatMonitor | None = None
        self.waiting_since = now()
        try:
            while not self._has_completed(work):
                self.require_all()
                heartbeats = heartbeats or HeartbeatMonitor(self, self.members)
                heartbeats.look()
        finally:
            self.waiting_since = None

    def wait_for_device(self) -> None:
        """Wait until the device has finished its queued work, as `wait` does for a collective."""
        if self.device is not None:
            self.wait(_Enqueued(self.device))

    def _has_completed(self, work: Any) -> bool:
        """Wait for a moment; return whether a collective has completed, or raise its error."""
        if self.device is not None:
            return self._has_completed_on_device(work)
        try:
            work.wait(timedelta(seconds=SECONDS_BETWEEN_LOOKS))
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # raises its error; there is none if it has completed since the look
        return True

    def _has_completed_on_device(self, work: Any) -> bool:
        """Do the same for a device; see [Note: leaving a collective of a device]."""
        until = now() + SECONDS_BETWEEN_LOOKS
        while not work.is_completed():
            if now() > until:
                return False
            time.sleep(_SECONDS_BETWEEN_QUERIES)
        _wait_inside_torch(work) if isinstance(work, dist.Work) else work.wait()  # raises its error
        if self._released == self.epoch:
            raise MembershipChanged(f"Rank {self.rank}: a member was lost, and the collective was aborted.")
        return True

    @contextmanager
    def interrupting_collectives(self) -> Iterator[None]:
        """Let collectives in this block raise `MembershipChanged`; see [Note: leaving a collective]."""

        def wait(work: Any, *timeout: timedelta) -> bool:
            if timeout or work.is_completed():
                return _wait_inside_torch(work, *timeout)
            self.wait(work)
            return True

        dist.Work.wait = wait  # type: ignore[method-assign, assignment]
        self._is_in_block = True
        try:
            yield
            self.wait_for_device()
        finally:
            self._is_in_block = False
            dist.Work.wait = _wait_inside_torch  # type: ignore[method-assign]

    def require_all(self) -> None:
        """Raise `MembershipChanged` if a member of this epoch was lost."""
        if self.has_lost_one:
            raise MembershipChanged(f"Rank {self.rank}: a member was lost.") from None

    def hears_of_loss(self) -> bool:
        """Wait until the loss that made a collective fail is known; return False if none is heard of."""
        return self._hears_of_loss(SECONDS_TO_HEAR_OF_A_LOSS)

    def learn_of_loss(self) -> None:
        """Wait until that loss is known; if none is heard of, report the group of this epoch as broken to all."""
        if self.hears_of_loss():
            return
        reason = f"a collective failed on rank {self.rank}, and no process ended"
        if self.events.publish_next(self._heard + 1, "broken", [], reason):
            logger.warning("Rank %d: %s.", self.rank, reason)
        self._hears_of_loss(_FOREVER)

    def _hears_of_loss(self, seconds: float) -> bool:
        """Look for a loss, and not only when the thread does, which is seldom in a large run."""
        until = now() + seconds
        while not self.has_lost_one and now() < until:
            self._read_events(self.events)
            time.sleep(pause(SECONDS_BETWEEN_POLLS, self.replicas, REQUESTS_PER_SECOND_OF_WAITERS))
        return self.has_lost_one

    def expel(self, ranks: Sequence[int], reason: str) -> NoReturn:
        """Go on without the replicas of some counterparts; all counterparts call it, also those that are to leave."""
        if self.rank in ranks:
            logger.error("Rank %d leaves the run, and a replacement takes its place: %s.", self.rank, reason)
            self._is_closed.wait(SECONDS_TO_BE_KILLED)  # by the launcher, which hears of it from the others
            raise SystemExit(f"Rank {self.rank}: {reason}.")
        if self.rank == min(set(self.counterparts()) - set(ranks)):
            self.events.publish("left", self.whole_replicas(ranks), reason)
        raise MembershipChanged(f"Rank {self.rank}: the others go on without {_replicas(ranks)}: {reason}.")

    # --- agreeing ---------------------------------------------------------------------------------------------------

    def agree(self, status: Any) -> Agreement:
        """Agree with the other members on the newest epoch, and return everybody's status."""
        while True:
            epoch = self.events.newest()
            members = self.events.members(epoch)
            found = self._agree_at(epoch, members, status)
            if found is not None:
                previous, self.epoch, self.members = self.epoch, epoch, members
                return Agreement(epoch=epoch, previous=previous, members=members, statuses=found)

    def _agree_at(self, epoch: int, members: tuple[int, ...], status: Any) -> Mapping[int, Any] | None:
        if self.rank not in members:
            raise SystemExit(f"Rank {self.rank} was taken for lost and replaced: this process leaves the run.")
        store, place = self.store, f"go/{epoch}"
        store.set(f"status/{epoch}/{self.rank}", json.dumps(status))
        try:
            if store.add(f"arrived/{epoch}", 1) == len(members):
                texts = store.multi_get([f"status/{epoch}/{rank}" for rank in members])
                given = {rank: text.decode(errors="replace") for rank, text in zip(members, texts, strict=True)}
                store.compare_set(place, "", statuses.join(given))
            self._poll(lambda: store.check([place]), members)
            text = store.get(place).decode(errors="replace")
            return None if text == SUPERSEDED else statuses.split(text, members)
        except InvalidDataError as error:  # another program wrote it: all agree once more
            logger.warning("Rank %d: %s.", self.rank, error)
            self.events.publish_next(epoch + 1, "broken", [], str(error))
            return None

    def first(self, key: str, value: int) -> int:
        """Return the value that the lowest member gives for a key, or gave at the first request."""
        if self.rank != self.members[0]:
            self._poll(lambda: self.has_lost_one or self.store.check([key]), self.members)
        what = f"{printable(key)} in the store of the run"
        return build(int, parse_json(self.store.compare_set(key, "", str(value)), what), what)

    def wait_for_next_event(self) -> None:
        """Wait for the first event after this epoch."""
        self._poll(lambda: self.events.newest() > self.epoch, self.members)

    def _poll(self, is_reached: Callable[[], bool], members: Sequence[int]) -> None:
        """Wait for something in the store that other members bring about, unless they fall silent."""
        heartbeats = HeartbeatMonitor(self, members)
        self.waiting_since = now()
        try:
            while not is_reached():
                heartbeats.look()
                time.sleep(pause(SECONDS_BETWEEN_POLLS, self.replicas, REQUESTS_PER_SECOND_OF_WAITERS))
        finally:
            self.waiting_since = None

    def changes(self, agreement: Agreement) -> list[str]:
        """Return what happened between two epochs, in words."""
        events = [self.events.read(number) for number in range(agreement.previous + 1, agreement.epoch + 1)]
        return [f"{_replicas(event.ranks)} {event.kind}" for event in events]

    # --- joining ----------------------------------------------------------------------------------------------------

    def ask_to_join(self, after: int) -> int:
        """Ask the members to admit this replacement, and wait until they have; return the number of that event.

        Events up to `after` are of earlier attempts.
        """
        number = after
        self.store.set(f"waiting/{self.rank}", str(self.incarnation))
        self.store.add(f"asked/{self.rank}", 1)
        while True:
            number += 1
            event = self.events.read(number)
            if event.kind == "joined" and self.rank in event.ranks:
                return number

    def sees_request(self) -> bool:
        """Return whether a replacement asks to join. The members ask for that in turn if they are many."""
        requests = len(self.members) * (self.replicas - len(self.members))
        if not requests or now() - self._asked_for_requests < pause(0.0, requests):
            return False
        self._asked_for_requests = now()
        return bool(self.waiting_ranks())

    def waiting_ranks(self) -> list[int]:
        """Return the ranks whose present replacement asked to join; the launcher counts the replacements.

        A replica of several processes joins when all of them have asked.
        """
        absent = sorted(set(range(self.replicas)).difference(self.members))
        asked = [rank for rank in absent if self.store.check([f"waiting/{rank}", f"incarnation/{rank}"])]
        valid = {rank for rank in asked if self.store.get(f"waiting/{rank}") == self.store.get(f"incarnation/{rank}")}
        valid = {rank for rank in valid if self._asked(rank) > self.store.add(f"admitted/{rank}", 0)}
        return [rank for rank in absent if valid.issuperset(self.whole_replicas([rank]))]

    def admit(self, ranks: Sequence[int]) -> None:
        """Publish that replacements have joined, unless another event came first; the caller looks again later.

        Each request is answered once: a replacement that is lost again without its launcher must not be let in again.
        """
        asked = {rank: self._asked(rank) for rank in ranks}
        if self.events.publish_next(self.epoch + 1, "joined", ranks, ""):
            for rank, number in asked.items():
                self.store.set(f"admitted/{rank}", str(number))

    def _asked(self, rank: int) -> int:
        return int(self.store.add(f"asked/{rank}", 0))

    def add_lost_time(self, seconds: float) -> None:
        """Note how long training stood still for the change to this epoch."""
        milliseconds = round(1000 * seconds)
        self.store.set(f"cost/{self.epoch}", str(milliseconds))
        self.store.add("lost_ms", milliseconds)

    def announce_folder(self, folder: str) -> None:
        """Tell the launcher the folder of the run's log, where it writes the changes of the members."""
        self.store.set("folder", folder)


class HeartbeatMonitor:
    """What a member that waits has seen of the others; see [Note: silent members]."""

    def __init__(self, member: Member, others: Sequence[int], events: Events | None = None) -> None:
        """Watch members; `events` are those of the calling thread."""
        self._member = member
        self._events = member.events if events is None else events
        watched = watched_members(member.rank, others)
        self._heartbeats = Heartbeats(self._events.store, _HEARTBEATS, watched)
        self._pause = pause(SECONDS_BETWEEN_HEARTBEATS, len(others) * len(watched), REQUESTS_PER_SECOND_OF_WAITERS)
        self._looked = now()

    def look(self) -> None:
        """Look at the counters, if that was not just done; publish that silent members have left."""
        if now() - self._looked < self._pause:
            return
        self._looked = now()
        member, silent = self._member, self._heartbeats.silent()
        if not silent or member.rank in silent:
            return
        events = self._events
        present = events.members(events.newest())  # another member may have seen it before
        if silent := [rank for rank in silent if rank in present]:
            reason = f"no heartbeat for {SECONDS_WITHOUT_HEARTBEAT:.0f} s"
            events.publish_next(events.newest() + 1, "left", member.whole_replicas(silent), reason)


class _Enqueued:
    """The work that is queued on the device, as a collective that is waited for."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.Event(device)
        self._event.record(torch.accelerator.current_stream(device))

    def is_completed(self) -> bool:
        """Return whether it is done."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Do nothing: it raises no error of its own."""


def _replicas(ranks: Sequence[int]) -> str:
    return f"replica {', '.join(map(str, ranks))}" if ranks else "the group"


def now() -> float:
    """Return a clock for durations."""
    return time.monotonic()
