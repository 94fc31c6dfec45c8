"""Exchange the first failure of a run between its machines, through the rendezvous store.

A machine whose ranks only lost their peers can then name the rank that failed, and the other machines stop early.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

from ...errors import InvalidDataError
from ...untrusted import read_message
from ..console import notify

SECONDS_TO_EXCHANGE = 3.0
_NO_TIMEOUT = timedelta(days=300)
Store: TypeAlias = Any  # torch's, whose stubs know neither the name nor `clone`


@dataclass(frozen=True)
class _Result:
    culprit: dict[str, Any] | None


class FailureExchange:
    """The result of one attempt: the culprit, or that all machines are done. The first publication wins."""

    def __init__(self, store: Store, num_machines: int) -> None:
        self._key = "meshwright/end"  # every attempt has its own prefix in the store
        self._num_machines = num_machines
        self._store = store
        self._received = threading.Event()
        self.culprit: dict[str, Any] | None = None
        threading.Thread(target=self._listen, args=(store.clone(),), daemon=True).start()

    @staticmethod
    def is_supported(store: Store) -> bool:
        """Return whether this torch can clone a store, so that a thread has its own connection (2.8 on)."""
        return hasattr(store, "clone")

    def publish(self, culprit: dict[str, Any] | None) -> None:
        """Publish the culprit, or None if no rank failed, unless another machine was first."""
        self._run_in_thread(lambda store: store.compare_set(self._key, "", json.dumps({"culprit": culprit})))

    def mark_done(self) -> None:
        """Count this machine as done; the last machine publishes that all are."""
        self._run_in_thread(self._count_done)

    def wait(self, seconds: float) -> bool:
        """Wait until a result is published; return whether it was."""
        return self._received.wait(seconds)

    def exit_barrier(self) -> None:
        """Wait briefly until every machine has the result: the store ends with the machine that hosts it."""
        self._run_in_thread(self._wait_for_other_machines)

    def _listen(self, store: Store) -> None:
        try:
            store.wait([self._key], _NO_TIMEOUT)
            self.culprit = read_message(store, self._key, _Result).culprit
        except RuntimeError:  # the machine that hosts the store has ended
            return
        except InvalidDataError as error:
            notify(f"{error}: this machine does not learn which rank failed, or that all have ended.")
            return
        self._received.set()

    def _count_done(self, store: Store) -> None:
        if store.add(f"{self._key}/done", 1) == self._num_machines:
            store.compare_set(self._key, "", json.dumps({"culprit": None}))

    def _wait_for_other_machines(self, store: Store) -> None:
        deadline = time.monotonic() + SECONDS_TO_EXCHANGE
        number = store.add(f"{self._key}/ready", 1)
        while number < self._num_machines and time.monotonic() < deadline:
            time.sleep(0.02)
            number = store.add(f"{self._key}/ready", 0)

    def _run_in_thread(self, action: Callable[[Store], object]) -> None:
        """Run an action for a few seconds at most: a lost store may block, and signals must be handled meanwhile."""

        def act() -> None:
            try:
                action(self._store.clone())
            except RuntimeError:  # as in _listen
                return

        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        thread.join(SECONDS_TO_EXCHANGE)
