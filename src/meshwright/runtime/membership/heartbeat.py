"""Heartbeats: every process counts up in the store, and those that wait for it see when it stops.

[Note: one store for all] All processes of a run ask one store, which answers some ten thousand requests per second.
What each of them asks again and again is therefore asked less often the more they are, and what a process reads at a
change of the members does not grow with their number: docs/scale.md has the count.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

SECONDS_BETWEEN_HEARTBEATS = 1.0
SECONDS_WITHOUT_HEARTBEAT = 15.0
"""After how long without a heartbeat a process or a machine is taken for lost by those that wait for it."""

REQUESTS_PER_SECOND = 2_000
"""How often the processes of a run ask for the same thing in health, all together."""
REQUESTS_PER_SECOND_OF_WAITERS = 10_000
"""The same while training stands still."""
_WATCH_ALL = 64
_NONE = b"none"


def pause(least: float, requests: int, per_second: int = REQUESTS_PER_SECOND) -> float:
    """Return the seconds between two rounds of so many requests, which all processes make together."""
    return max(least, requests / per_second)


def watched_members(own: int, members: Sequence[int]) -> list[int]:
    """Return the members that one of them watches: all if they are few, else those 1, 4, 16, ... places further.

    Each is so watched by some on other machines. With itself: a process that cannot send heartbeats must not accuse
    others.
    """
    if len(members) <= _WATCH_ALL:
        return list(members)
    place = bisect_left(members, own)
    distances = [0, *(4**power for power in range(len(members).bit_length()) if 4**power < len(members))]
    return sorted({members[(place + distance) % len(members)] for distance in distances})


class Heartbeats:
    """The counters of others, as this process has seen them."""

    def __init__(self, store: Any, name: str, others: Iterable[int]) -> None:
        self._store = store
        self._name = name
        self._sent = 0
        # Number -> its count as the store has it, and when that was new.
        self._seen = {other: (_NONE, time.monotonic()) for other in others}

    def send(self, own: int) -> None:
        """Count up."""
        self._sent += 1
        self._store.set(f"{self._name}/{own}", str(self._sent))

    def silent(self) -> list[int]:
        """Look at the counters, and return those that have not changed for too long.

        A counter that another program has overwritten is none, and counts again from the next heartbeat on. So it is
        not read by `add`, which closes the connection then.
        """
        for other, (before, _) in self._seen.items():
            count = self._store.compare_set(f"{self._name}/{other}", _NONE, _NONE)  # `get` would wait for the first
            if count != before:
                self._seen[other] = count, time.monotonic()
        return [
            other for other, (_, since) in self._seen.items() if time.monotonic() - since > SECONDS_WITHOUT_HEARTBEAT
        ]

    def forget(self, other: int) -> None:
        """Look no more at a counter."""
        del self._seen[other]
