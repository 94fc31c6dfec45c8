"""Write the changes of the members beside the run's log, for `meshwright watch` and `meshwright report`.

The launcher of machine 0 writes them, because it outlives every process. `replicas.jsonl` has one record per line:

    {"time": ..., "event": 3, "kind": "left", "ranks": [2], "reason": "rank 2 was killed by SIGKILL",
     "replicas": 3, "of": 4}
    {"event": 3, "seconds": 0.21}
    {"total": {"time": ..., "replacements": 1, "seconds": 0.21, "of_seconds": 86.0}}

An event is followed by the seconds that training stood still for it, once they are known. Events that the members
found together have one such line, at the last of them. A line of the kind `hangs`, without a number, is about a member
that stays and keeps the others waiting.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from time import time
from typing import Any

from .membership import Membership, ReplacementTotals

FILE_NAME = "replicas.jsonl"


class AttemptRecord:
    """What was written of the changes of one attempt."""

    def __init__(self, membership: Membership, earlier: ReplacementTotals, began: float) -> None:
        self._membership = membership
        self._earlier = earlier
        self._began = began  # by `time.time`
        self._written = 0
        self._without_cost: list[int] = []
        self._notes = 0

    def update(self) -> None:
        """Write what is new."""
        newest, has_note = self._membership.newest(), self._membership.note(self._notes + 1) is not None
        if newest == self._written and not self._without_cost and not has_note:
            return
        folder = self._membership.folder()
        if folder is None:  # no process logs to files
            return
        if lines := [*self._new_notes(), *self._events(newest), *self._costs()]:
            self._append(folder, [*lines, self._total()])

    def end(self) -> None:
        """Write the total."""
        self.update()
        folder = self._membership.folder()
        if folder is not None and self._written:
            self._append(folder, [self._total()])

    def _events(self, newest: int) -> list[dict[str, Any]]:
        lines = []
        for number in range(self._written + 1, newest + 1):
            event, members = self._membership.event(number)
            lines.append(
                {
                    "time": event.time,
                    "event": number,
                    "kind": event.kind,
                    "ranks": event.ranks,
                    "reason": event.reason,
                    **self._count(members),
                }
            )
            self._without_cost.append(number)
        self._written = newest
        return lines

    def _count(self, members: Iterable[int]) -> dict[str, int]:
        everybody = range(self._membership.replicas)
        by_replica = self._membership.by_replica
        return {"replicas": len(by_replica(members)), "of": len(by_replica(everybody))}

    def _new_notes(self) -> list[dict[str, Any]]:
        lines = []
        while (note := self._membership.note(self._notes + 1)) is not None:
            lines.append(asdict(note) | self._count(self._membership.members()))
            self._notes += 1
        return lines

    def _costs(self) -> list[dict[str, Any]]:
        lines = []
        for number in list(self._without_cost):
            if (seconds := self._membership.cost(number)) is not None:
                lines.append({"event": number, "seconds": seconds})
                self._without_cost = [later for later in self._without_cost if later > number]
        return lines

    def _total(self) -> dict[str, Any]:
        totals, now = self._earlier + self._membership.totals(), time()
        return {
            "total": {
                "time": now,
                "replacements": totals.replacements,
                "seconds": totals.seconds,
                "of_seconds": now - self._began,
            }
        }

    def _append(self, folder: str, lines: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(line) + "\n" for line in lines)
        with suppress(OSError), open(os.path.join(folder, FILE_NAME), "a", encoding="utf-8") as file:
            file.write(text)
