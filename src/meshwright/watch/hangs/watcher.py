"""A watchdog thread: it detects that this process waits too long, and reaches a verdict with the other ranks.

In a healthy run it samples the training thread periodically and checks one key of the store: has any rank raised the
alarm? In between it exchanges step times to find stragglers (`exchange.py`). It uses the store only and no collective,
so a stuck collective does not affect it.
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

import torch
import torch.distributed as dist

from ...runtime import phases
from ...runtime.devices import device as devices
from ...untrusted import printable
from ..place import describe_error, place_of_caller
from ..reports import Observer, ProcessReport
from ..stragglers.device_clock import clock_for
from ..stragglers.exchange import StepTimeExchange
from .consensus import RETURN_GRACE_SECONDS, Consensus, absence_of, who_is
from .interrupting import Interrupter
from .verdict import Absence, HangVerdict, judge

logger = logging.getLogger(__name__)

MIN_PEER_TIMEOUT = 2.5
"""Seconds for which a coordinator waits for the others, and rank 0 at its exit, at least."""
POLL_SECONDS = 2.0
FAST_POLL_SECONDS = 0.25
JOIN_TIMEOUT = 3.0
RANKS_PER_SECOND = 2_000
"""Polls of the store per second from all ranks together: with more ranks each polls less often."""
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset) by (remote )?peer|broken pipe|peer closed|ncclremoteerror|remote process exited",
    re.IGNORECASE,
)
_STORE_ERRORS = (RuntimeError, OSError, ValueError)

# [Note: the end of the store]
# Rank 0's process often hosts the store. When it exits, it announces that under the key that the others poll anyway,
# and waits a moment until they have read it. From then on they poll no store, and know why rank 0 is missing. If it is
# killed, the poll fails, and the state of its process, as the operating system reports it, replaces the announcement.


def is_lost_peer_error(error: BaseException) -> bool:
    """Return whether an error is what a healthy rank gets when another one has exited."""
    return isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None


class Watcher:
    """The watchdog of one process."""

    def __init__(self, store: Any, rank: int, world_size: int, threshold: float, device: torch.device) -> None:
        self.rank, self.world_size, self.threshold = rank, world_size, threshold
        self._device = device
        self._store = store
        self._group = weakref.ref(dist.group.WORLD)
        self._pid = os.getpid()
        self._observer = Observer(rank, threading.current_thread())
        self._interrupter = Interrupter(threading.current_thread())
        self._alarm_after = threshold
        """Seconds without progress after which this rank raises the alarm."""
        self._round = 0
        self._store_host: tuple[str, int] | None = None
        """Host and process id of rank 0."""
        self._absent_with_store: dict[int, Absence] | None = None
        """The ranks that are absent since the store was lost; None while there is a store."""
        self._exit_reason = "has left: its script has ended"
        self._stopped = False
        self._stopping = threading.Event()
        self._wakeup = threading.Event()
        self._verdicts: queue.SimpleQueue[HangVerdict] = queue.SimpleQueue()
        self._clock = clock_for(device)
        self._exchange: StepTimeExchange | None = StepTimeExchange(self._clock, store, rank, world_size)
        self._min_period = world_size / RANKS_PER_SECOND
        self._period = max(min(POLL_SECONDS, threshold / 4), self._min_period)
        self._peer_timeout = max(MIN_PEER_TIMEOUT, 2 * self._period)
        self._consensus = Consensus(
            store,
            self._observer,
            self._stopping,
            world_size=world_size,
            threshold=threshold,
            timeout=self._peer_timeout,
        )
        self._previous_excepthook = sys.excepthook
        self._previous_exit: Any = sys.exit
        self._thread = threading.Thread(target=self._watch, name="meshwright watcher", daemon=True)

    @classmethod
    def start(cls, store: Any, rank: int, world_size: int, threshold: float, device: torch.device) -> Watcher:
        """Register this process with the others, and start the thread."""
        own = store.clone()  # a connection of its own: the other one may be held by a blocking call
        own.set_timeout(timedelta(seconds=10))
        generation = own.add(f"watchers/{rank}", 1)  # keys of an earlier watcher are not for this one
        watcher = cls(dist.PrefixStore(str(generation), own), rank, world_size, threshold, device)  # type: ignore[attr-defined]
        watcher._store.set(f"who/{rank}", json.dumps([socket.gethostname(), os.getpid()]))
        atexit.register(watcher.stop)
        sys.excepthook = watcher._on_uncaught
        sys.exit = watcher._on_exit
        phases.start(watcher._clock)
        watcher._thread.start()
        return watcher

    def watches_open_group(self) -> bool:
        """Return whether this process, and not the one it was forked from, watches the current process group."""
        group = self._group()
        is_open = dist.is_initialized() and group is not None and group is dist.group.WORLD
        return is_open and not self._stopped and self._pid == os.getpid()

    def stop(self, *, announce: bool = True) -> None:
        """Stop the thread, and announce to the others that this process exits.

        Without `announce` the store is not used. That is for a process group that was destroyed before: a data worker
        that was forked from the process which hosted its store may hold the connection open, and a request would never
        be answered.
        """
        if os.getpid() != self._pid:  # a forked child has the parent's exit functions
            return
        if not self._stopped:
            self._stopped = True
            self._shut_down(announce)
        self._join()  # a thread inside the store must not see the interpreter end

    def _shut_down(self, announce: bool) -> None:
        atexit.unregister(self.stop)
        healthy = not self._stopping.is_set()
        self._stopping.set()
        self._wakeup.set()
        self._interrupter.close()
        phases.stop(self._clock)
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._previous_excepthook
        if sys.exit == self._on_exit:
            sys.exit = self._previous_exit
        self._join()
        if healthy and announce and self._absent_with_store is None and not self._is_in_store_call():
            with suppress(*_STORE_ERRORS):
                self._announce_exit()

    def _join(self) -> None:
        if threading.current_thread() is not self._thread and not self._interrupter.is_exiting:
            self._thread.join(JOIN_TIMEOUT)

    def _is_in_store_call(self) -> bool:
        """Return whether the thread holds the connection: another request would then block as long as it does."""
        return self._thread.is_alive() and threading.current_thread() is not self._thread

    def _announce_exit(self) -> None:
        """See [Note: the end of the store]."""
        self._store.set(f"left/{self.rank}", self._exit_reason)
        self._store.add("exited", 1)
        if self.rank == 0:
            for number in (self._round, self._round + 1):  # ranks in a round poll for the next one
                self._store.set(f"alarm/{number}", f"0 {self._exit_reason}")
            deadline = time.monotonic() + self._peer_timeout + RETURN_GRACE_SECONDS
            while time.monotonic() < deadline and self._store.add("exited", 0) < self.world_size:
                time.sleep(0.05)

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print an uncaught exception; if it is only a lost connection, add why the peer has exited."""
        watched = os.getpid() == self._pid and not self._stopped
        lost_peer = watched and is_lost_peer_error(error)
        if lost_peer:  # first of all: the report must not show the printing below as what this rank does
            self._observer.lost_peer_error = error
            if threading.current_thread() is self._observer.thread:
                self._interrupter.disarm()
            self._wakeup.set()
        elif watched and not self._stopping.is_set():
            self._exit_reason = f"has failed: {describe_error(error)}"
        self._previous_excepthook(kind, error, trace)
        if lost_peer:
            with suppress(queue.Empty):
                self._print_cause(error, self._verdicts.get(timeout=2 * self._peer_timeout + 5))

    def _print_cause(self, error: Any, verdict: HangVerdict) -> None:
        explanation = f"Rank {self.rank}: {verdict.text}"
        print(explanation, file=sys.stderr, flush=True)
        error.__notes__ = [*getattr(error, "__notes__", ()), explanation]  # for later printing
        error.__accelerate_diagnosis__ = verdict.text  # for the launcher's record

    def _on_exit(self, status: Any = None, /) -> NoReturn:
        """Replace `sys.exit`, to record the line at which the script exits."""
        place = place_of_caller()
        self._exit_reason = f"has left: sys.exit({'' if status is None else repr(status)[:80]}) at {place.location()}"
        raise SystemExit(status)

    def _watch(self) -> None:
        devices.activate(self._device)  # reading the recorder queries events: on another device it would open a context
        while not self._stopping.is_set():
            stalled_seconds = self._observer.sample()
            if stalled_seconds < self.threshold / 2:  # it has made progress since the last alarm
                self._alarm_after = self.threshold
            # Poll fast shortly before an alarm, and until rank 0 is known: once it is killed, it cannot be found.
            fast = stalled_seconds >= self._alarm_after / 2 or self._store_host is None
            seconds = FAST_POLL_SECONDS if fast else self._period
            self._pause(max(min(seconds, self._period), self._min_period))
            self._wakeup.clear()
            if self._stopping.is_set():
                return
            if not self.watches_open_group():
                self._exit_reason = "has left: it closed its process group"
                self.stop()
                return
            if self._absent_with_store is None:
                try:
                    self._poll()
                except _STORE_ERRORS as error:
                    logger.debug("Rank %d: the store is gone.", self.rank, exc_info=error)
                    self._continue_without_store(self._absence_of_store_host())
            if self._absent_with_store is not None and self._is_stuck():
                self._judge_alone()

    def _pause(self, seconds: float) -> None:
        """Wait until the next poll, and meanwhile exchange step times with the others."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._wakeup.wait(left if self._exchange is None else min(left, self._exchange.period)):
                return
            try:
                if self._exchange is not None and self._absent_with_store is None:
                    self._exchange.poll()
            except _STORE_ERRORS as error:  # the next poll finds out why
                logger.debug("Rank %d compares steps no more.", self.rank, exc_info=error)
                self._exchange = None

    def _is_stuck(self) -> bool:
        stalled_seconds = self._observer.sample()
        if self._observer.lost_peer_error is not None:
            return True
        return stalled_seconds >= self._alarm_after and self._observer.is_waiting()

    def _poll(self) -> None:
        """Raise the alarm if this rank is stuck, and check whether any rank has raised it."""
        self._find_store_host()
        alarm = f"alarm/{self._round}"
        if self._is_stuck() and not self._store.check([alarm]):
            self._store.set(alarm, str(self.rank))
        if not self._store.check([alarm]):
            return
        exit_reason = printable(self._store.get(alarm).decode(errors="replace").partition(" ")[2], 1000)
        if exit_reason:  # of rank 0: see [Note: the end of the store]
            self._store.add("exited", 1)
            self._continue_without_store({0: Absence(exit_reason, is_final=True)})
        else:
            self._run_round()

    def _run_round(self) -> None:
        """Reach a verdict with the other ranks, and act on it."""
        number = self._round
        self._round += 1
        result = self._consensus.run_round(number)
        if result is not None:  # else the coordinator has disappeared: the next round has another one
            self._act(*result)

    def _act(self, verdict: HangVerdict, own: ProcessReport) -> None:
        if self._observer.lost_peer_error is not None:  # the training thread has its error, and waits for the cause
            if verdict.recheck_in or not (verdict.fatal or own.lost_peer):  # it was judged without that error
                self._wakeup.set()
                return
            self._verdicts.put(verdict)
            self._stopping.set()
        elif verdict.recheck_in:
            self._alarm_after = self._observer.sample() + verdict.recheck_in
        elif not verdict.fatal:
            self._alarm_after = max(self._alarm_after, self._observer.sample()) * 2
        elif not self._stopping.is_set():
            self._verdicts.put(verdict)  # its wait may end with an error at this moment
            self._stopping.set()
            text, exits_first = f"Rank {self.rank}: {verdict.text}", self.rank == verdict.exits_first
            self._interrupter.interrupt(self._observer.thread, text, exits_first=exits_first)

    def _continue_without_store(self, absent: dict[int, Absence]) -> None:
        self._absent_with_store = absent
        self._alarm_after = max(self._alarm_after, self._observer.sample() + RETURN_GRACE_SECONDS)

    def _judge_alone(self) -> None:
        """Judge from the state of this process and of rank 0, where there is no store."""
        absent = self._absent_with_store or {}
        if not all(absence.is_final for absence in absent.values()):  # its connections close before it is seen dead
            absent = self._absent_with_store = self._absence_of_store_host()
        report = self._observer.report()
        verdict = judge({self.rank: report}, absent, self.threshold, all_known=False)
        verdict.log_notice()
        self._act(verdict, report)

    def _find_store_host(self) -> None:
        if self._store_host is None and self._store.check(["who/0"]):
            self._store_host = who_is(self._store, 0)

    def _absence_of_store_host(self) -> dict[int, Absence]:
        if self.rank == 0:
            return {}
        if self._store_host is None:
            return {0: Absence("has not been heard of, and the store does not answer", is_final=False)}
        return {0: absence_of(*self._store_host)}
