"""What the machines of a run say to each other about its end, through the store where they met.

Machines whose ranks only lost their peers can so name the rank that failed, and those that have not noticed yet stop.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias

SECONDS_TO_EXCHANGE = 3.0
_NO_TIMEOUT = timedelta(days=300)
Store: TypeAlias = Any  # torch's, whose stubs know neither the name nor `clone`


class FailureExchange:
    """The end of one attempt: who failed, or that all are done. The machine that speaks first is heard by all."""

    def __init__(self, store: Store, num_machines: int) -> None:
        self._key = "accelerate/end"  # every attempt has a part of the store for itself
        self._num_machines = num_machines
        self._store = store
        self._received = threading.Event()
        self.culprit: dict[str, Any] | None = None
        threading.Thread(target=self._listen, args=(store.clone(),), daemon=True).start()

    @staticmethod
    def is_supported(store: Store) -> bool:
        """Tell whether this torch gives a thread a connection of its own (2.8 on)."""
        return hasattr(store, "clone")

    def publish(self, culprit: dict[str, Any] | None) -> None:
        """Say who failed, or None if nobody did, unless another machine has spoken."""
        self._run_in_thread(lambda store: store.compare_set(self._key, "", json.dumps(culprit)))

    def mark_done(self) -> None:
        """Say that this machine's ranks have ended well; the last machine tells all."""
        self._run_in_thread(self._count_done)

    def wait(self, seconds: float) -> bool:
        """Wait for the end to be known."""
        return self._received.wait(seconds)

    def exit_barrier(self) -> None:
        """Wait for a moment until every machine knows how it ended: the store goes with one of them."""
        self._run_in_thread(self._wait_for_other_machines)

    def _listen(self, store: Store) -> None:
        try:
            store.wait([self._key], _NO_TIMEOUT)
            self.culprit = json.loads(store.get(self._key))
        except RuntimeError:  # the machine that held the store is gone: nothing more to hear
            return
        self._received.set()

    def _count_done(self, store: Store) -> None:
        if store.add(f"{self._key}/done", 1) == self._num_machines:
            store.compare_set(self._key, "", json.dumps(None))

    def _wait_for_other_machines(self, store: Store) -> None:
        deadline = time.monotonic() + SECONDS_TO_EXCHANGE
        number = store.add(f"{self._key}/ready", 1)
        while number < self._num_machines and time.monotonic() < deadline:
            time.sleep(0.02)
            number = store.add(f"{self._key}/ready", 0)

    def _run_in_thread(self, action: Callable[[Store], object]) -> None:
        """Act for a few seconds at most: a store whose machine is gone may answer late, and signals must be heard."""

        def act() -> None:
            try:
                action(self._store.clone())
            except RuntimeError:  # as in _listen
                return

        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        thread.join(SECONDS_TO_EXCHANGE)
