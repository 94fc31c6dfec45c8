"""Compare how fast the ranks are, through the store: each leaves its newest windows there, rank 0 reads and judges.

The watcher's thread does all of it. A rank's traffic does not grow with the number of ranks: with many of them all
write less often, so that neither the store nor rank 0 gets more to do.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from contextlib import suppress
from typing import Any

import numpy as np

from ...runtime import phases
from ...runtime.phases import NAMES, Phases
from .judging import Finding, Judge, Window
from .windows import FEWEST_STEPS, LENGTH, MEDIANS, NUMBER, WHOLE, Windows, unpacked

logger = logging.getLogger(__name__)

FILE_NAME = "ranks.jsonl"
RANKS_PER_SECOND = 1_000
_SECONDS_BETWEEN_EXCHANGES = 0.3
_SECONDS_OF_FAST_STEPS = 2.0
"""How long a window takes, where ten steps are over before the next exchange; with many ranks one exchange."""
_MOST_DOUBLINGS = 9
"""Of the number of steps of a window: it stays below what the clock keeps."""
_SECONDS_BETWEEN_LINES = 2.0
_SECONDS_UNTIL_SAID_AGAIN = 600.0
_MOST_BYTES = 4 << 20
_MOST_RANKS_IN_FULL = 64
_SLOWEST = 16


class Exchange:
    """What one rank tells of its steps, and on rank 0 what becomes of it."""

    def __init__(self, clock: Phases, store: Any, rank: int, world_size: int) -> None:
        self.period = max(_SECONDS_BETWEEN_EXCHANGES, world_size / RANKS_PER_SECOND)
        self._clock, self._store, self._rank = clock, store, rank
        self._windows = Windows()
        self._due = -math.inf
        self._told = self._is_complete = False
        self._keys = [f"phases/{other}" for other in range(world_size)]
        self._judge = Judge()
        self._speaker = _Speaker()
        self._diary = _Diary()

    def turn(self) -> None:
        """Tell what is new, if it is time to."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + self.period
        closed = self._windows.take(self._clock.rows)
        if closed or not self._told:
            self._store.set(self._keys[self._rank], self._windows.packed())
            self._told = True
            self._agree_on_length()
        if self._rank == 0 and self._judge.lacks(self._windows.newest):
            self._hear()

    def _agree_on_length(self) -> None:
        """Let rank 0 choose how many steps a window has."""
        if self._rank == 0:
            length = self._fitting_length()
            if length != self._windows.length or not self._windows.newest[LENGTH]:
                self._windows.resize(length)
                self._store.set("phases/length", str(length))
        elif self._store.check(["phases/length"]):
            self._windows.resize(int(self._store.get("phases/length")))

    def _fitting_length(self) -> int:
        step, length = float(self._windows.newest[WHOLE]), self._windows.length
        if not step:
            return length
        if FEWEST_STEPS * step >= self.period:
            return FEWEST_STEPS
        wanted = max(_SECONDS_OF_FAST_STEPS, self.period)
        if length > FEWEST_STEPS and 0.6 * wanted <= length * step <= 3 * wanted:
            return length
        doublings = math.ceil(math.log2(wanted / step / FEWEST_STEPS))
        return FEWEST_STEPS << min(doublings, _MOST_DOUBLINGS)

    def _hear(self) -> None:
        self._is_complete = self._is_complete or self._store.check(self._keys)
        if not self._is_complete:
            return
        for window in self._judge.hear(unpacked(self._store.multi_get(self._keys))):
            if window.finding is not None:
                self._clock.news = {
                    "straggler/rank": window.finding.rank,
                    "straggler/cost": window.finding.cost,
                    "straggler/phase": NAMES[window.finding.phase],
                }
            self._speaker.hear(window.finding)
            self._diary.note(window, len(self._keys))


class _Speaker:
    """Say a finding once, and again at growing intervals."""

    def __init__(self) -> None:
        self._current: Finding | None = None
        self._quiet_until: dict[tuple[int, int], tuple[float, float]] = {}
        self._said = False

    def hear(self, finding: Finding | None) -> None:
        before, self._current = self._current, finding
        if before is not None and (finding is None or _key(finding) != _key(before)):
            if self._said and finding is None:
                logger.warning("%s", before.over())
            self._said = False
        if finding is None:
            return
        until, interval = self._quiet_until.get(_key(finding), (-math.inf, _SECONDS_UNTIL_SAID_AGAIN))
        now = time.monotonic()
        if now >= until:
            logger.warning("%s", finding)
            self._said = True
            self._quiet_until[_key(finding)] = now + interval, 2 * interval


class _Diary:
    """Lines beside a run's own, for `accelerate watch`: what every phase took on every rank, in microseconds."""

    def __init__(self) -> None:
        self._next = -math.inf
        self._finding: Finding | None = None

    def note(self, window: Window, num_ranks: int) -> None:
        """Append a line, every two seconds or when something was found."""
        folder, now = phases.run_folder, time.monotonic()
        news = (window.finding and _key(window.finding)) != (self._finding and _key(self._finding))
        if folder is None or (now < self._next and not news):
            return
        self._next, self._finding = now + _SECONDS_BETWEEN_LINES, window.finding
        with suppress(OSError):  # a full disk shows where the run's own lines are written
            _append(os.path.join(folder, FILE_NAME), json.dumps(_record(window, num_ranks)) + "\n")


def _record(window: Window, num_ranks: int) -> dict[str, Any]:
    number, length = window.rows[0, NUMBER], window.rows[0, LENGTH]
    record: dict[str, Any] = {
        "time": time.time(),
        "step": int((number + 1) * length),
        "steps": int(length),
        "of": num_ranks,
        "phases": NAMES,
        "ranks": {
            window.ranks[index]: [round(seconds * 1e6) for seconds in window.rows[index, MEDIANS]]
            for index in _chosen(window)
        },
    }
    if window.finding is not None:
        record["straggler"] = {
            "rank": window.finding.rank,
            "phase": NAMES[window.finding.phase],
            "cost": round(window.finding.cost, 4),
            "text": str(window.finding),
        }
    return record


def _chosen(window: Window) -> list[int]:
    """Return which ranks are written down: all, or of very many the slowest, the median and the fastest."""
    if len(window.ranks) <= _MOST_RANKS_IN_FULL:
        return list(range(len(window.ranks)))
    medians = window.rows[:, MEDIANS]
    order = np.argsort(medians.sum(axis=1) - medians[:, [phases.BACKWARD, phases.WAITING]].sum(axis=1))
    named = [] if window.finding is None else [window.ranks.index(window.finding.rank)]
    return sorted({int(order[0]), int(order[len(order) // 2]), *map(int, order[-_SLOWEST:]), *named})


def _append(file: str, line: str) -> None:
    """Add a line; of a file that has grown long, only the newer half stays."""
    with open(file, "ab") as lines:
        lines.write(line.encode())
        size = lines.tell()
    if size > _MOST_BYTES:
        with open(file, "rb") as lines:
            lines.seek(size // 2)
            lines.readline()
            newer = lines.read()
        with open(f"{file}.new", "wb") as lines:
            lines.write(newer)
        os.replace(f"{file}.new", file)


def _key(finding: Finding) -> tuple[int, int]:
    return finding.rank, finding.phase
