"""Watch the members of a run under `meshwright launch --survive`: who keeps the others waiting, who is slow.

[Note: members that hang] A member that is stuck in its own code still sends heartbeats, and its process does not end.
The others wait for it in the reduction of a step. One that has waited for long asks, by a number in the launcher's
store; the thread of every member looks for that number, and answers where its training thread is. Who waits keeps
nobody waiting: the others are named. The run goes on waiting, because a member may also save, validate or be debugged;
on request the members that hang are removed, and replaced as if they had died.

[Note: steps of members] The times of steps are exchanged as without `--survive`. When the members change, they begin to
count again: a replacement has not made the steps of the others.
"""

from __future__ import annotations

import atexit
import json
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ...errors import InvalidDataError
from ...runtime import phases
from ...runtime.devices import device as devices
from ...runtime.membership.events import Events, write_note
from ...runtime.membership.heartbeat import pause
from ...runtime.membership.member import Member, now
from ...untrusted import printable, read_message
from ..place import COLLECTIVE, DEBUGGER, place_of
from ..reports import format_ranks
from ..stragglers.device_clock import clock_for
from ..stragglers.exchange import StepTimeExchange

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 2.0
_SECONDS_BETWEEN_EXCHANGES = 0.3
_SECONDS_TO_ANSWER = 10.0
JOIN_TIMEOUT = 3.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Where the training thread of a member is."""

    rank: int
    waits: bool
    in_debugger: bool
    place: str


class MemberWatcher:
    """The thread of one member; see [Note: members that hang]."""

    def __init__(
        self, member: Member, seconds: float, replace_after: float | None, device: torch.device | None = None
    ) -> None:
        self._member = member
        self._device = device or torch.device("cpu")
        self._clock = clock_for(self._device)
        phases.start(self._clock)
        self._exchange: StepTimeExchange | None = None
        self._epoch = -1
        self._seconds = seconds
        self._replace_after = replace_after
        self._alarm_after = self._first_alarm()
        self._answered = (0, 0)  # epoch, number of the question
        self._trainer = threading.current_thread()
        self._period = min(SECONDS_BETWEEN_LOOKS, seconds / 4)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="meshwright member watcher", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        phases.stop(self._clock)
        self._thread.join(JOIN_TIMEOUT)

    def _first_alarm(self) -> float:
        return self._seconds if self._replace_after is None else min(self._seconds, self._replace_after)

    def _watch(self) -> None:
        devices.activate(self._device)  # events of the clock are queried
        try:
            store, looked = self._member.connect(), now()
            while not self._stopping.wait(_SECONDS_BETWEEN_EXCHANGES):
                if not self._member.has_joined:
                    continue
                self._exchange_steps(store)
                if now() - looked >= pause(self._period, self._member.replicas):
                    looked = now()
                    self._answer(store)
                    self._ask_if_stuck(store)
        except RuntimeError:  # the launcher is gone
            return

    def _exchange_steps(self, store: Any) -> None:
        """Exchange the times of steps among the present members; see [Note: steps of members]."""
        epoch, members = self._member.epoch, self._member.members
        if epoch != self._epoch and self._member.rank in members:
            self._epoch = epoch
            self._clock.restart()
            place = dist.PrefixStore(f"steps/{epoch}", store)  # type: ignore[attr-defined]
            own, size = members.index(self._member.rank), len(members)
            self._exchange = StepTimeExchange(self._clock, place, own, size, names=members, before=self._exchange)
        if self._exchange is not None and len(members) > 1:
            self._exchange.poll()

    # --- answering --------------------------------------------------------------------------------------------------

    def _answer(self, store: Any) -> None:
        """Say where this process is, if a member asks."""
        epoch = self._member.epoch
        question = epoch, int(store.add(_number_of(epoch), 0))
        if question[1] == 0 or question == self._answered:
            return
        self._answered = question
        store.set(_answer_of(*question, self._member.rank), json.dumps(asdict(self._own())))
        if (waited := self._waited()) is not None:
            self._alarm_after = max(self._alarm_after, self._later_than(waited))

    def _own(self) -> Answer:
        thread = self._trainer if self._trainer.is_alive() else threading.main_thread()
        place = place_of(thread.ident or 0)
        return Answer(
            rank=self._member.rank,
            waits=self._waited() is not None or (place is not None and place.phase == COLLECTIVE),
            in_debugger=place is not None and place.phase == DEBUGGER,
            place="the end of the script" if place is None else place.describe(),
        )

    def _waited(self) -> float | None:
        """Return for how long this member waits for others; None if it does not."""
        since = self._member.waiting_since
        return None if since is None else now() - since

    def _later_than(self, waited: float) -> float:
        """Return when to ask again: at growing intervals, and when a member is to be replaced."""
        later = 2 * waited
        if self._replace_after is not None and waited < self._replace_after:
            return min(later, self._replace_after)
        return later

    # --- asking -----------------------------------------------------------------------------------------------------

    def _ask_if_stuck(self, store: Any) -> None:
        waited = self._waited()
        if waited is None:
            self._alarm_after = self._first_alarm()
            return
        if waited < self._alarm_after:
            return
        epoch, since = self._member.epoch, self._member.waiting_since
        number = self._answered[1] + 1 if self._answered[0] == epoch else 1  # not one after a question not yet answered
        own = str(self._member.rank)
        if store.compare_set(f"{_number_of(epoch)}/{number}", "", own).decode() != own:
            return  # another member asks
        store.add(_number_of(epoch), 1)
        self._answer(store)
        answers = self._collect(store, epoch, number)
        waited = self._waited()
        if waited is not None and self._member.waiting_since == since and self._member.epoch == epoch:
            self._judge(store, answers, waited)

    def _collect(self, store: Any, epoch: int, number: int) -> list[Answer]:
        """Return the answers of the members that give one in time."""
        keys = [_answer_of(epoch, number, rank) for rank in self._member.members]
        until = now() + max(_SECONDS_TO_ANSWER, 3 * pause(self._period, self._member.replicas))
        while now() < until and not store.check(keys):
            self._stopping.wait(0.1)
        answers = []
        for rank, key in zip(self._member.members, keys, strict=True):
            with suppress(InvalidDataError):  # as if it had not answered
                if store.check([key]) and (answer := read_message(store, key, Answer)).rank == rank:
                    answers.append(replace(answer, place=printable(answer.place)))
        return answers

    def _judge(self, store: Any, answers: Sequence[Answer], waited: float) -> None:
        """Name who does not wait, or remove it if that was requested."""
        hanging = [answer for answer in answers if not answer.waits]
        waiting = len(answers) - len(hanging)
        is_over = self._replace_after is not None and waited >= self._replace_after
        if is_over and 0 < len(hanging) < waiting and not any(answer.in_debugger for answer in hanging):
            reason = f"it kept the others waiting for {waited:.0f} s at {hanging[0].place}"
            ranks = self._member.whole_replicas(answer.rank for answer in hanging)
            Events(store, self._member.replicas).publish("left", ranks, reason)
            return
        for answer in hanging:
            text = f"rank {answer.rank} has kept {waiting} others waiting for {waited:.0f} s: {answer.place}"
            write_note(store, "hangs", [answer.rank], text)
            logger.warning("%s", text[0].upper() + text[1:])
        silent = set(self._member.members) - {answer.rank for answer in answers}
        if silent:
            names = format_ranks(silent)
            logger.warning("%s did not say where it is, after others waited for %.0f s", names, waited)
        elif not hanging:
            logger.warning("All members have waited for each other for %.0f s, at %s", waited, _places(answers))


def _number_of(epoch: int) -> str:
    return f"hangs/{epoch}"


def _answer_of(epoch: int, number: int, rank: int) -> str:
    return f"{_number_of(epoch)}/{number}/{rank}"


def _places(answers: Sequence[Answer]) -> str:
    return "; ".join(f"rank {answer.rank}: {answer.place}" for answer in answers)
