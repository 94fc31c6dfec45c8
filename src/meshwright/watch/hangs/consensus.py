"""Agree on one verdict after an alarm: all ranks report, the coordinator decides, all confirm that none has moved."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from ...errors import InvalidDataError
from ...untrusted import printable, read_message
from ..reports import Observer, ProcessReport, state_of_process
from .verdict import Absence, HangVerdict, judge

logger = logging.getLogger(__name__)

RECHECK_SECONDS = 0.5
REQUESTS_PER_SECOND = 20_000
"""Requests to the store from all ranks together during a round, which lasts a few seconds."""
RETURN_GRACE_SECONDS = 3.0
"""After its last collective a rank exits, while another, on a busy machine, may only then return from that call."""

# [Note: reports are of different moments]
# A late rank may arrive between the first report and the last one: the others proceed, and their reports are outdated.
# A coordinator that combined them with what the late rank did next (it may have exited) would find a fault where there
# is none. So every rank that reported checks again when the coordinator has all reports. If one that waited has moved,
# the verdict is dropped, and whichever rank still waits raises the alarm again.


class Consensus:
    """One process's part in the rounds that produce a verdict. Uses the store only, and no collective."""

    def __init__(
        self,
        store: Any,
        observer: Observer,
        stopping: threading.Event,
        *,
        world_size: int,
        threshold: float,
        timeout: float,
    ) -> None:
        self._store, self._observer, self._stopping = store, observer, stopping
        self._world_size, self._threshold = world_size, threshold
        self._timeout = timeout
        """Seconds for which the coordinator waits for the others."""

    def run_round(self, number: int) -> tuple[HangVerdict, ProcessReport] | None:
        """Return the verdict and the report of this process; None if the coordinator has disappeared."""
        report = self._observer.report()
        self._store.set(f"report/{number}/{report.rank}", report.to_json())
        self._store.add(f"reports/{number}", 1)
        if self._store.add(f"coordinator/{number}", 1) == 1:
            verdict = self._coordinate(number, report)
        else:
            is_decided = self._wait_for_key(f"decided/{number}")
            self._confirm(number, report)
            if not is_decided or not self._wait_for_key(f"verdict/{number}"):
                return None
            try:
                verdict = HangVerdict.from_json(self._store.get(f"verdict/{number}"))
            except InvalidDataError as error:
                logger.warning("Rank %d: verdict/%d in the store of the run: %s", report.rank, number, error)
                return None
        self._store.add(f"received/{number}", 1)
        if report.rank == 0:  # its process may host the store
            self._wait_until(lambda: self._count("received", number) >= self._count("reports", number))
        return verdict, report

    def _coordinate(self, number: int, own: ProcessReport) -> HangVerdict:
        """Decide on the reports of all ranks, and publish the verdict."""
        reports, absent = self._collect(number)
        verdict = judge(reports, absent, self._threshold)
        if verdict.fatal and absent and not any(report.lost_peer for report in reports.values()):
            self._stopping.wait(RETURN_GRACE_SECONDS)
        self._store.set(f"decided/{number}", "")
        self._confirm(number, own)  # see [Note: reports are of different moments]
        self._wait_until(lambda: self._count("unmoved", number) + self._count("moved", number) >= len(reports))
        if self._count("moved", number) or self._stopping.is_set():
            verdict = HangVerdict(fatal=False, culprits=[], text="", recheck_in=RECHECK_SECONDS)
        self._store.set(f"verdict/{number}", verdict.to_json())
        verdict.log_notice()
        return verdict

    def _confirm(self, number: int, report: ProcessReport) -> None:
        """Publish whether the report of this process still holds."""
        lost_since = self._observer.lost_peer_error is not None and not report.lost_peer
        moved = self._stopping.is_set() or lost_since or (report.is_blocked and self._observer.has_progressed())
        self._store.add(f"{'moved' if moved else 'unmoved'}/{number}", 1)

    def _wait_for_key(self, key: str) -> bool:
        """Poll for a key of the coordinator; a wait inside the store could not be ended with the process."""
        pause = max(0.1, self._world_size / REQUESTS_PER_SECOND)
        self._wait_until(lambda: bool(self._store.check([key])), pause, extra_seconds=RETURN_GRACE_SECONDS + 2)
        return bool(self._store.check([key]))

    def _count(self, name: str, number: int) -> int:
        return int(self._store.add(f"{name}/{number}", 0))

    def _collect(self, number: int) -> tuple[dict[int, ProcessReport], dict[int, Absence]]:
        """Wait until every rank has sent a report or is known to be absent for good."""
        world = set(range(self._world_size))
        keys = {rank: f"report/{number}/{rank}" for rank in world}
        reported: set[int] = set()
        absent: dict[int, Absence] = {}

        def complete() -> bool:
            if self._count("reports", number) >= self._world_size:
                reported.update(world)
                return True
            reported.update(rank for rank in world - reported if self._store.check([keys[rank]]))
            absent.clear()
            absent.update(self._absences(world - reported))
            return all(absence.is_final for absence in absent.values()) and reported | set(absent) == world

        self._wait_until(complete, pause=0.2)
        ordered = sorted(reported)
        texts = self._store.multi_get([keys[rank] for rank in ordered])
        reports = {}
        for rank, text in zip(ordered, texts, strict=True):
            try:
                reports[rank] = ProcessReport.from_json(text, rank)
            except InvalidDataError as error:
                absent[rank] = Absence(f"is unknown, because {printable(str(error))}", is_final=False)
        reported.intersection_update(reports)
        return reports, {rank: absence for rank, absence in absent.items() if rank not in reported}

    def _absences(self, ranks: set[int]) -> dict[int, Absence]:
        found = {}
        for rank in sorted(ranks):
            if self._store.check([f"left/{rank}"]):
                reason = self._store.get(f"left/{rank}").decode(errors="replace")
                found[rank] = Absence(printable(reason, 1000), is_final=True)
            elif self._store.check([f"who/{rank}"]):
                found[rank] = absence_of(*who_is(self._store, rank))
        return found

    def _wait_until(self, condition: Callable[[], bool], pause: float = 0.05, extra_seconds: float = 0.0) -> None:
        """Poll a condition until it holds, this process stops, or the timeout has passed."""
        deadline = time.monotonic() + self._timeout + extra_seconds
        while time.monotonic() < deadline and not condition() and not self._stopping.wait(pause):
            pass


def who_is(store: Any, rank: int) -> tuple[str, int]:
    """Return the host and the process id of a rank."""
    try:
        host, pid = read_message(store, f"who/{rank}", tuple[str, int])
    except InvalidDataError as error:
        logger.warning("%s", error)
        return "an unknown host", 0
    return printable(host), pid


def absence_of(host: str, pid: int) -> Absence:
    """Return the state of a process that does not answer."""
    state = state_of_process(host, pid)
    return Absence(state, is_final=state.startswith("is dead"))
