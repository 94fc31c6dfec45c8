"""What the watchers do when one of them has raised the alarm: report, judge, and make sure that it still holds."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from ..reports import Observer, Report, state_of_process
from .verdict import Absence, Verdict, judge

SECONDS_TO_LOOK_AGAIN = 0.5
QUESTIONS_PER_SECOND = 20_000
"""What all ranks together ask of the store while a judge judges: a few seconds in which nothing else happens."""
SECONDS_TO_COME_BACK = 3.0
"""After its last call a rank leaves, and another one, on a busy machine, may only then come back from that call."""

# [Note: reports are of different moments]
# Between the first report and the last one a rank that was late may arrive: the others go on, and what they reported
# is no longer so. A judge who put it together with what the late rank did next (it may have left) would find a fault
# where there is none. So everybody who reported looks again when the judge has all reports. If one that waited has
# moved, nothing is said, and whoever still waits raises the alarm again.


class Meeting:
    """The meetings of one process with the others. No collective is used, only the store."""

    def __init__(
        self,
        store: Any,
        observer: Observer,
        stopping: threading.Event,
        *,
        world_size: int,
        threshold: float,
        seconds: float,
    ) -> None:
        self._store, self._observer, self._stopping = store, observer, stopping
        self._world_size, self._threshold = world_size, threshold
        self._seconds = seconds
        """How long the judge waits for the others."""

    def hold(self, number: int) -> tuple[Verdict, Report] | None:
        """Return the verdict, and what this process had reported; None if the judge has gone."""
        report = self._observer.report()
        self._store.set(f"report/{number}/{report.rank}", report.to_json())
        self._store.add(f"reports/{number}", 1)
        if self._store.add(f"judges/{number}", 1) == 1:
            verdict = self._lead(number, report)
        else:
            is_judged = self._appears(f"judged/{number}")
            self._look_again(number, report)
            if not is_judged or not self._appears(f"verdict/{number}"):
                return None
            verdict = Verdict.from_json(self._store.get(f"verdict/{number}"))
        self._store.add(f"heard/{number}", 1)
        if report.rank == 0:  # whose process may hold the store
            self._wait_until(lambda: self._count("heard", number) >= self._count("reports", number))
        return verdict, report

    def _lead(self, number: int, own: Report) -> Verdict:
        """Judge what the others report, and tell them."""
        reports, absent = self._collect(number)
        verdict = judge(reports, absent, self._threshold)
        if verdict.fatal and absent and not any(report.lost for report in reports.values()):
            self._stopping.wait(SECONDS_TO_COME_BACK)
        self._store.set(f"judged/{number}", "")
        self._look_again(number, own)  # see [Note: reports are of different moments]
        self._wait_until(lambda: self._count("unmoved", number) + self._count("moved", number) >= len(reports))
        if self._count("moved", number) or self._stopping.is_set():
            verdict = Verdict(fatal=False, culprits=[], text="", again_in=SECONDS_TO_LOOK_AGAIN)
        self._store.set(f"verdict/{number}", verdict.to_json())
        verdict.log_a_notice()
        return verdict

    def _look_again(self, number: int, report: Report) -> None:
        lost_since = self._observer.lost_by is not None and not report.lost
        moved = self._stopping.is_set() or lost_since or (report.is_of_a_wait and self._observer.has_moved())
        self._store.add(f"{'moved' if moved else 'unmoved'}/{number}", 1)

    def _appears(self, key: str) -> bool:
        """Ask for what the judge writes; a wait inside the store could not be ended with the process."""
        pause = max(0.1, self._world_size / QUESTIONS_PER_SECOND)
        self._wait_until(lambda: bool(self._store.check([key])), pause, more_seconds=SECONDS_TO_COME_BACK + 2)
        return bool(self._store.check([key]))

    def _count(self, what: str, number: int) -> int:
        return int(self._store.add(f"{what}/{number}", 0))

    def _collect(self, number: int) -> tuple[dict[int, Report], dict[int, Absence]]:
        """Wait for reports until every rank has sent one or is known to be gone."""
        everybody = set(range(self._world_size))
        keys = {rank: f"report/{number}/{rank}" for rank in everybody}
        there: set[int] = set()
        absent: dict[int, Absence] = {}

        def complete() -> bool:
            if self._count("reports", number) >= self._world_size:
                there.update(everybody)
                return True
            there.update(rank for rank in everybody - there if self._store.check([keys[rank]]))
            absent.clear()
            absent.update(self._absences(everybody - there))
            return all(absence.for_good for absence in absent.values()) and there | set(absent) == everybody

        self._wait_until(complete, pause=0.2)
        ordered = sorted(there)
        texts = self._store.multi_get([keys[rank] for rank in ordered])
        reports = {rank: Report.from_json(text) for rank, text in zip(ordered, texts, strict=True)}
        return reports, {rank: absence for rank, absence in absent.items() if rank not in there}

    def _absences(self, ranks: set[int]) -> dict[int, Absence]:
        found = {}
        for rank in sorted(ranks):
            if self._store.check([f"left/{rank}"]):
                found[rank] = Absence(self._store.get(f"left/{rank}").decode(), for_good=True)
            elif self._store.check([f"who/{rank}"]):
                host, pid = json.loads(self._store.get(f"who/{rank}"))
                found[rank] = absence_of(host, pid)
        return found

    def _wait_until(self, condition: Callable[[], bool], pause: float = 0.05, more_seconds: float = 0.0) -> None:
        """Look again and again, until this process ends or the others have had their time."""
        until = time.monotonic() + self._seconds + more_seconds
        while time.monotonic() < until and not condition() and not self._stopping.wait(pause):
            pass


def absence_of(host: str, pid: int) -> Absence:
    """Find out what has become of a process."""
    how = state_of_process(host, pid)
    return Absence(how, for_good=how.startswith("is dead"))
