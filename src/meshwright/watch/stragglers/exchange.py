"""Exchange step times through the store: each rank publishes its newest windows, and rank 0 finds stragglers.

It runs in the watcher's thread. The traffic of a rank does not grow with the number of ranks: with many of them all
publish less often, so that the load of the store and of rank 0 stays constant.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ...runtime import phases
from ...runtime.phases import NAMES, PhaseClock
from .detection import SlowRank, StragglerDetector, Window
from .windows import FEWEST_STEPS, LENGTH, MEDIANS, NUMBER, WHOLE, Windows, unpack

logger = logging.getLogger(__name__)

FILE_NAME = "ranks.jsonl"
RANKS_PER_SECOND = 1_000
_SECONDS_BETWEEN_EXCHANGES = 0.3
_SECONDS_BETWEEN_THROUGHPUTS = 1.0
_SECONDS_OF_FAST_STEPS = 2.0
"""Length of a window where ten steps are shorter than one exchange; with many ranks, one exchange."""
_MOST_DOUBLINGS = 9
"""Of the number of steps in a window, which must stay below the capacity of the clock."""
_SECONDS_BETWEEN_LINES = 2.0
_SECONDS_BETWEEN_WARNINGS = 600.0
_MOST_BYTES = 4 << 20
_MOST_RANKS_IN_FULL = 64
_SLOWEST = 16


class StepTimeExchange:
    """Publish the step times of one rank; on rank 0, also compare those of all ranks."""

    def __init__(
        self,
        clock: PhaseClock,
        store: Any,
        rank: int,
        world_size: int,
        *,
        names: Sequence[int] | None = None,
        before: StepTimeExchange | None = None,
    ) -> None:
        """Take part as a rank of a group; `names` are those of its ranks, where they are not their numbers.

        What the exchange `before` this one has warned of is not warned of again.
        """
        self.period = max(_SECONDS_BETWEEN_EXCHANGES, world_size / RANKS_PER_SECOND)
        self._clock, self._store, self._rank = clock, store, rank
        self._windows = Windows()
        self._next_poll = -math.inf
        self._has_published = self._is_complete = False
        self._next_throughput = -math.inf
        self._keys = [f"phases/{other}" for other in range(world_size)]
        self._throughputs = [f"throughput/{other}" for other in range(world_size)]
        self._names = range(world_size) if names is None else names
        self._detector = StragglerDetector()
        self._warner: _Warner = _Warner() if before is None else before._warner
        self._trace = _TraceFile()

    def poll(self) -> None:
        """Publish new windows if the period is over; on rank 0, compare."""
        now = time.monotonic()
        if now < self._next_poll:
            return
        self._next_poll = now + self.period
        closed = self._windows.consume(self._clock.collect())
        if closed or not self._has_published:
            self._store.set(self._keys[self._rank], self._windows.pack())
            self._has_published = True
            self._sync_length()
        if self._rank == 0 and self._detector.is_pending(self._windows.newest):
            self._examine_windows()
        if phases.meter is not None:
            self._exchange_throughput(phases.meter, now)

    def _exchange_throughput(self, meter: phases.Published, now: float) -> None:
        """Publish the numbers of this rank's meter; on rank 0, read those of all ranks."""
        if now < self._next_throughput:
            return
        self._next_throughput = now + max(_SECONDS_BETWEEN_THROUGHPUTS, self.period)
        self._store.set(self._throughputs[self._rank], meter.row())
        if self._rank == 0 and self._store.check(self._throughputs):
            meter.take(self._store.multi_get(self._throughputs))

    def _sync_length(self) -> None:
        """Use the number of steps per window that rank 0 chooses."""
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

    def _examine_windows(self) -> None:
        self._is_complete = self._is_complete or self._store.check(self._keys)
        if not self._is_complete:
            return
        for examined in self._detector.update(unpack(self._store.multi_get(self._keys))):
            window = examined.renamed(self._names)
            if window.finding is not None:
                self._clock.extra_values = {
                    "straggler/rank": window.finding.rank,
                    "straggler/cost": window.finding.cost,
                    "straggler/phase": NAMES[window.finding.phase],
                }
            self._warner.update(window.finding)
            self._trace.write(window, len(self._keys))


class _Warner:
    """Warn of a straggler once, and again at growing intervals."""

    def __init__(self) -> None:
        self._current: SlowRank | None = None
        self._quiet_until: dict[tuple[int, int], tuple[float, float]] = {}
        self._has_warned = False

    def update(self, finding: SlowRank | None) -> None:
        before, self._current = self._current, finding
        if before is not None and (finding is None or _key(finding) != _key(before)):
            if self._has_warned and finding is None:
                logger.warning("%s", before.resolved_message())
            self._has_warned = False
        if finding is None:
            return
        quiet_until, interval = self._quiet_until.get(_key(finding), (-math.inf, _SECONDS_BETWEEN_WARNINGS))
        now = time.monotonic()
        if now >= quiet_until:
            logger.warning("%s", finding)
            self._has_warned = True
            self._quiet_until[_key(finding)] = now + interval, 2 * interval


class _TraceFile:
    """A file in the run's folder, for `meshwright watch`: microseconds per phase on every rank."""

    def __init__(self) -> None:
        self._next_line = -math.inf
        self._finding: SlowRank | None = None

    def write(self, window: Window, num_ranks: int) -> None:
        """Append a line, every two seconds or when the straggler changes."""
        folder, now = phases.run_folder, time.monotonic()
        changed = (window.finding and _key(window.finding)) != (self._finding and _key(self._finding))
        if folder is None or (now < self._next_line and not changed):
            return
        self._next_line, self._finding = now + _SECONDS_BETWEEN_LINES, window.finding
        with suppress(OSError):  # a full disk fails in the run's own log as well
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
            for index in _selected(window)
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


def _selected(window: Window) -> list[int]:
    """Return the ranks to write: all, or of very many the slowest, the median and the fastest."""
    if len(window.ranks) <= _MOST_RANKS_IN_FULL:
        return list(range(len(window.ranks)))
    medians = window.rows[:, MEDIANS]
    order = np.argsort(medians.sum(axis=1) - medians[:, [phases.BACKWARD, phases.WAITING]].sum(axis=1))
    straggler = [] if window.finding is None else [window.ranks.index(window.finding.rank)]
    return sorted({int(order[0]), int(order[len(order) // 2]), *map(int, order[-_SLOWEST:]), *straggler})


def _append(file: str, line: str) -> None:
    """Append a line; of a file that has grown large, keep the newer half."""
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


def _key(finding: SlowRank) -> tuple[int, int]:
    return finding.rank, finding.phase
