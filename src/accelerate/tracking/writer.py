"""Hand records to one tracker without making the training loop wait for it, or fall with it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..runtime.runtime import rank_of_this_process
from .general import GeneralTracker

logger = logging.getLogger(__name__)

LARGEST_BACKLOG = 10_000
"""Records that may wait for a slow tracker; later ones are counted and left out."""
SECONDS_BETWEEN_TRIES = (1.0, 4.0, 16.0)
SECONDS_TO_FINISH = 60.0
WRONG_CALLS_IN_A_ROW = 3

# [Note: two kinds of failures]
# A tracker fails because the call is wrong (a value it cannot take, a bug in a hand-written tracker): trying again
# cannot help, and the next record may be fine. Or because the world is wrong (no network, a full disk): the same record
# may pass in a moment. The first kind costs its record, the second is tried again; either disables the tracker when
# it does not end. The user hears of the first failure and of the end, not of every step.
WRONG_CALL = (TypeError, ValueError, AttributeError, LookupError, NotImplementedError, ImportError, AssertionError)


@dataclass
class Record:
    """What one call of `log` said; tensors of an accelerator become numbers when somebody reads them."""

    values: dict[str, Any]
    step: int | None
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    _settled: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def settled(self) -> dict[str, Any]:
        """Return the values with numbers for tensors of one element; waits for the device the first time."""
        with self._lock:
            if not self._settled:
                self.values = _numbers(self.values)
                self._settled = True
            return self.values


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _numbers(inner) for name, inner in value.items()}
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


class Writer:
    """A tracker, the thread that calls it, and what became of the calls."""

    def __init__(self, tracker: GeneralTracker, *, strict: bool = False) -> None:
        self.tracker = tracker
        self.name = str(getattr(tracker, "name", type(tracker).__name__))
        self.strict = strict
        self.error: Exception | None = None
        self.disabled = False
        self.lost = 0
        self._wrong_calls = 0
        self._reported = False
        self._records: queue.Queue[Record | None] = queue.Queue()
        self._hurry = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, config: dict[str, Any] | None) -> None:
        """Open the tracker's run and store the config."""
        try:
            self.tracker.start()
            if config is not None:
                self.tracker.store_init_configuration(config)
        except Exception as error:
            if self.strict or isinstance(error, WRONG_CALL):
                raise
            self._disable(error, "could not start")
        else:
            if getattr(self.tracker, "in_background", True):
                self._thread = threading.Thread(target=self._work, name=f"tracker {self.name}", daemon=True)
                self._thread.start()

    def put(self, record: Record) -> None:
        """Take a record over; does not wait, unless the tracker asked to be called from here."""
        if self._thread is None:
            self._hand_over(record)
        elif self.disabled:
            self.lost += 1
        elif self._records.qsize() >= LARGEST_BACKLOG:
            if self.lost == 0:
                self._say(f"is too slow: {LARGEST_BACKLOG:,} records wait for it, and the next ones are left out")
            self.lost += 1
        else:
            self._records.put(record)
        self.raise_if_strict()

    def raise_if_strict(self) -> None:
        """Raise what went wrong in the tracker, if that was asked for."""
        if self.error is not None and self.strict:
            error, self.error = self.error, None
            raise error

    def drain(self, seconds: float) -> bool:
        """Wait until everything that was logged has arrived; tell whether it did."""
        until = time.monotonic() + seconds
        while self._thread is not None and self._thread.is_alive() and self._records.unfinished_tasks:
            if time.monotonic() > until:
                return False
            time.sleep(0.001)
        return True

    def finish(self) -> None:
        """Let the tracker take what is left, and close its run."""
        seconds = SECONDS_TO_FINISH
        self._hurry.set()
        if not self.drain(min(2.0, seconds)):
            self._say(f"still has {_records(self._records.unfinished_tasks)} to write; waiting up to {seconds:.0f} s")
            if not self.drain(seconds):
                self.lost += self._records.unfinished_tasks
                self._say(f"did not take the last {_records(self._records.unfinished_tasks)} in time")
                self.disabled = True
                return
        if self._thread is not None:
            self._records.put(None)
            self._thread.join(seconds)
        if not self.disabled:
            try:
                self.tracker.finish()
            except Exception as error:
                self._keep(error)
                self._say(f"could not close its run: {_shown(error)}")
        if self.lost:
            self._say(f"missed {_records(self.lost)} of this run")

    def _work(self) -> None:
        while True:
            record = self._records.get()
            try:
                if record is None:
                    return
                self._hand_over(record)
            finally:
                self._records.task_done()

    def _hand_over(self, record: Record) -> None:
        if self.disabled:
            self.lost += 1
            return
        for pause in (*SECONDS_BETWEEN_TRIES, None):
            try:
                self.tracker.log(record.settled(), step=record.step, **record.options.get(self.name, {}))
            except WRONG_CALL as error:
                self._give_up_record(error)
                return
            except Exception as error:
                if pause is None or self._thread is None or self._hurry.is_set():
                    self.lost += 1
                    self._disable(error, "failed again" if pause is None else "failed")
                    return
                self._report(error, f"It is tried again in {pause:.0f} s, and training goes on.")
                self._hurry.wait(pause)
            else:
                self._wrong_calls = 0
                return

    def _give_up_record(self, error: Exception) -> None:
        self.lost += 1
        self._wrong_calls += 1
        if self._wrong_calls >= WRONG_CALLS_IN_A_ROW:
            self._disable(error, f"refused {self._wrong_calls} records in a row")
        else:
            self._report(error, "The record is left out, and training goes on.")

    def _report(self, error: Exception, consequence: str) -> None:
        self._keep(error)
        if not self._reported:
            self._reported = True
            self._say(f"raised {_shown(error)}. {consequence}{self._hint()}")

    def _disable(self, error: Exception, what: str) -> None:
        self._keep(error)
        self.disabled = True
        hint = "" if self._reported else self._hint()
        self._say(f"{what}: {_shown(error)}. Nothing more is logged there, and training goes on.{hint}")
        self._reported = True

    def _keep(self, error: Exception) -> None:
        self.error = self.error or error

    def _hint(self) -> str:
        if self._thread is None or type(self.tracker).__module__.startswith("accelerate."):
            return ""
        return " If it must be called from the training thread, set in_background = False in its class."

    def _say(self, what: str) -> None:
        logger.warning("[rank %d] the tracker %r %s.", rank_of_this_process(), self.name, what.removesuffix("."))


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().removesuffix(".")


def _records(count: int) -> str:
    return f"{count:,} record{'' if count == 1 else 's'}"
