"""A thread that notices when this process waits too long, asks the others through the store, and tells the verdict.

In health it looks at the training thread once in a while and asks the store one question: is anybody stuck? In between
it compares what the clocks of the training threads have counted (`exchange.py`). No collective is ever used, so a stuck
one is no obstacle.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import re
import socket
import sys
import threading
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn

import torch.distributed as dist

from ...runtime import phases
from ..place import described, place_of_caller
from ..reports import Observer, Report
from ..stragglers.exchange import Exchange
from .consensus import SECONDS_TO_COME_BACK, Meeting, absence_of
from .interrupting import Interrupter
from .verdict import Absence, Verdict, judge

logger = logging.getLogger(__name__)

SECONDS_FOR_OTHERS = 2.5
"""How long a judge waits for the others, and rank 0 at its end, at least."""
SECONDS_BETWEEN_QUESTIONS = 2.0
SECONDS_BETWEEN_SOON_QUESTIONS = 0.25
SECONDS_TO_FINISH = 3.0
RANKS_PER_SECOND = 2_000
"""Questions per second that all ranks together ask of the store: with more ranks each asks less often."""
_LOST_PEER = re.compile(r"connection (was )?(closed|reset) by (remote )?peer|broken pipe|peer closed", re.IGNORECASE)
_STORE_IS_GONE = (RuntimeError, OSError, ValueError)

# [Note: the end of the store]
# Rank 0's process often holds the store. When it leaves, it says so under the key that the others ask for anyway, and
# waits a moment until they have heard it. From then on they ask nobody, and know why rank 0 does not come. If it is
# killed, the question fails, and what the operating system knows of rank 0 takes the place of its answer.


def is_of_a_lost_peer(error: BaseException) -> bool:
    """Tell whether an error is what a healthy rank meets when another one is gone."""
    return isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None


class Watcher:
    """The watcher of one process."""

    def __init__(self, store: Any, rank: int, world_size: int, threshold: float) -> None:
        self.rank, self.world_size, self.threshold = rank, world_size, threshold
        self._store = store
        self._group = weakref.ref(dist.group.WORLD)
        self._pid = os.getpid()
        self._observer = Observer(rank, threading.current_thread())
        self._interrupter = Interrupter(threading.current_thread())
        self._patience = threshold
        self._round = 0
        self._keeper: tuple[str, int] | None = None
        """Host and process of rank 0."""
        self._without_store: dict[int, Absence] | None = None
        """Who is gone and has taken the store along; None while there is one."""
        self._ending = "has left: its script has ended"
        self._ended = False
        self._stopping = threading.Event()
        self._asked = threading.Event()
        self._heard: queue.SimpleQueue[Verdict] = queue.SimpleQueue()
        self._clock = phases.Phases()
        self._exchange: Exchange | None = Exchange(self._clock, store, rank, world_size)
        self._fewest_seconds = world_size / RANKS_PER_SECOND
        self._period = max(min(SECONDS_BETWEEN_QUESTIONS, threshold / 4), self._fewest_seconds)
        self._seconds_for_others = max(SECONDS_FOR_OTHERS, 2 * self._period)
        self._meeting = Meeting(
            store,
            self._observer,
            self._stopping,
            world_size=world_size,
            threshold=threshold,
            seconds=self._seconds_for_others,
        )
        self._excepthook = sys.excepthook
        self._exit: Any = sys.exit
        self._thread = threading.Thread(target=self._watch, name="accelerate watcher", daemon=True)

    @classmethod
    def begin(cls, store: Any, rank: int, world_size: int, threshold: float) -> Watcher:
        """Announce this process to the others, and watch."""
        own = store.clone()  # a connection of its own: the other one may be held by a call that waits
        own.set_timeout(timedelta(seconds=10))
        generation = own.add(f"watchers/{rank}", 1)  # what an earlier one has left in the store is not for this one
        watcher = cls(dist.PrefixStore(str(generation), own), rank, world_size, threshold)  # type: ignore[attr-defined]
        watcher._store.set(f"who/{rank}", json.dumps([socket.gethostname(), os.getpid()]))
        atexit.register(watcher.end)
        sys.excepthook = watcher._explain
        sys.exit = watcher._note_exit
        phases.clock = watcher._clock
        watcher._thread.start()
        return watcher

    def is_of_the_open_group(self) -> bool:
        """Tell whether this process, and no process it was forked from, watches the group that is open now."""
        group = self._group()
        is_open = dist.is_initialized() and group is not None and group is dist.group.WORLD
        return is_open and not self._ended and self._pid == os.getpid()

    def end(self, *, quietly: bool = False) -> None:
        """Stop watching, and tell the others that this process will answer no more.

        `quietly` is for a group that was closed before: nobody listens at its store, and a data worker that was forked
        from the process which kept it may hold the connection open, so that a word to it would never be answered.
        """
        if os.getpid() != self._pid:  # a forked child has the parent's exit functions
            return
        if not self._ended:
            self._ended = True
            self._stop(quietly)
        self._join()  # a thread inside the store must not see the interpreter end

    def _stop(self, quietly: bool) -> None:
        atexit.unregister(self.end)
        in_health = not self._stopping.is_set()
        self._stopping.set()
        self._asked.set()
        self._interrupter.close()
        if phases.clock is self._clock:
            phases.clock = None
        if sys.excepthook == self._explain:
            sys.excepthook = self._excepthook
        if sys.exit == self._note_exit:
            sys.exit = self._exit
        self._join()
        if in_health and not quietly and self._without_store is None and not self._is_in_the_store():
            with suppress(*_STORE_IS_GONE):
                self._say_goodbye()

    def _join(self) -> None:
        if threading.current_thread() is not self._thread and not self._interrupter.leaves:
            self._thread.join(SECONDS_TO_FINISH)

    def _is_in_the_store(self) -> bool:
        """Tell whether the thread holds the connection: whoever asks then waits as long as it does."""
        return self._thread.is_alive() and threading.current_thread() is not self._thread

    def _say_goodbye(self) -> None:
        """See [Note: the end of the store]."""
        self._store.set(f"left/{self.rank}", self._ending)
        self._store.add("gone", 1)
        if self.rank == 0:
            for number in (self._round, self._round + 1):  # those who are at a meeting ask for the next one
                self._store.set(f"alarm/{number}", f"0 {self._ending}")
            until = time.monotonic() + self._seconds_for_others + SECONDS_TO_COME_BACK
            while time.monotonic() < until and self._store.add("gone", 0) < self.world_size:
                time.sleep(0.05)

    def _explain(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print an exception that nobody caught; if it says only that a peer is gone, say why."""
        watched = os.getpid() == self._pid and not self._ended
        lost = watched and is_of_a_lost_peer(error)
        if lost:  # first of all: from here on nobody takes the printing below for what this rank does
            self._observer.lost_by = error
            if threading.current_thread() is self._observer.thread:
                self._interrupter.spare()
            self._asked.set()
        elif watched and not self._stopping.is_set():
            self._ending = f"has failed: {described(error)}"
        self._excepthook(kind, error, trace)
        if lost:
            with suppress(queue.Empty):
                self._print_the_cause(error, self._heard.get(timeout=2 * self._seconds_for_others + 5))

    def _print_the_cause(self, error: Any, verdict: Verdict) -> None:
        explanation = f"Rank {self.rank}: {verdict.text}"
        print(explanation, file=sys.stderr, flush=True)
        error.__notes__ = [*getattr(error, "__notes__", ()), explanation]  # for whoever prints it again
        error.__accelerate_told__ = verdict.text  # for the launcher's record

    def _note_exit(self, status: Any = None, /) -> NoReturn:
        """Stand in for `sys.exit`, to know the line from which a script left."""
        place = place_of_caller()
        self._ending = f"has left: sys.exit({'' if status is None else repr(status)[:80]}) at {place.where()}"
        raise SystemExit(status)

    def _watch(self) -> None:
        while not self._stopping.is_set():
            still = self._observer.look()
            if still < self.threshold / 2:  # it has moved since it was last waited for
                self._patience = self.threshold
            soon = still >= self._patience / 2 or self._keeper is None  # whom nobody knows once it is killed
            seconds = SECONDS_BETWEEN_SOON_QUESTIONS if soon else self._period
            self._rest(max(min(seconds, self._period), self._fewest_seconds))
            self._asked.clear()
            if self._stopping.is_set():
                return
            if not self.is_of_the_open_group():
                self._ending = "has left: it closed its process group"
                self.end()
                return
            if self._without_store is None:
                try:
                    self._ask()
                except _STORE_IS_GONE as error:
                    logger.debug("Rank %d: the store is gone.", self.rank, exc_info=error)
                    self._go_on_without_store(self._state_of_the_keeper())
            if self._without_store is not None and self._is_stuck():
                self._judge_alone()

    def _rest(self, seconds: float) -> None:
        """Wait for the next question, and meanwhile compare with the others how long steps take."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._asked.wait(left if self._exchange is None else min(left, self._exchange.period)):
                return
            try:
                if self._exchange is not None and self._without_store is None:
                    self._exchange.turn()
            except _STORE_IS_GONE as error:  # the next question finds out why
                logger.debug("Rank %d compares steps no more.", self.rank, exc_info=error)
                self._exchange = None

    def _is_stuck(self) -> bool:
        still = self._observer.look()
        return self._observer.lost_by is not None or (still >= self._patience and self._observer.waits())

    def _ask(self) -> None:
        """Ask the one question, whether anybody is stuck."""
        self._find_the_keeper()
        alarm = f"alarm/{self._round}"
        if self._is_stuck() and not self._store.check([alarm]):
            self._store.set(alarm, str(self.rank))
        if not self._store.check([alarm]):
            return
        farewell = self._store.get(alarm).decode().partition(" ")[2]
        if farewell:
            self._store.add("gone", 1)
            self._go_on_without_store({0: Absence(farewell, for_good=True)})
        else:
            self._meet()

    def _meet(self) -> None:
        """Meet the others over what stands still, and act on the verdict."""
        number = self._round
        self._round += 1
        met = self._meeting.hold(number)
        if met is not None:  # else the judge is gone: the next round has another one
            self._act(*met)

    def _act(self, verdict: Verdict, own: Report) -> None:
        if self._observer.lost_by is not None:  # the training thread has its error, and waits for the explanation
            if verdict.again_in or not (verdict.fatal or own.lost):  # nobody knew that when it was judged
                self._asked.set()
                return
            self._heard.put(verdict)
            self._stopping.set()
        elif verdict.again_in:
            self._patience = self._observer.look() + verdict.again_in
        elif not verdict.fatal:
            self._patience = max(self._patience, self._observer.look()) * 2
        elif not self._stopping.is_set():
            self._heard.put(verdict)  # its wait may end by an error at this very moment
            self._stopping.set()
            text, leaves_first = f"Rank {self.rank}: {verdict.text}", self.rank == verdict.leaves_first
            self._interrupter.interrupt(self._observer.thread, text, leaves_first=leaves_first)

    def _go_on_without_store(self, absent: dict[int, Absence]) -> None:
        self._without_store = absent
        self._patience = max(self._patience, self._observer.look() + SECONDS_TO_COME_BACK)

    def _judge_alone(self) -> None:
        absent = self._without_store or {}
        if not all(absence.for_good for absence in absent.values()):  # its connections close before it is seen dead
            absent = self._without_store = self._state_of_the_keeper()
        report = self._observer.report()
        verdict = judge({self.rank: report}, absent, self.threshold, all_are_known=False)
        verdict.log_a_notice()
        self._act(verdict, report)

    def _find_the_keeper(self) -> None:
        if self._keeper is None and self._store.check(["who/0"]):
            host, pid = json.loads(self._store.get("who/0"))
            self._keeper = host, pid

    def _state_of_the_keeper(self) -> dict[int, Absence]:
        if self.rank == 0:
            return {}
        if self._keeper is None:
            return {0: Absence("has not been heard of, and the store does not answer", for_good=False)}
        return {0: absence_of(*self._keeper)}
