"""Pass records to one tracker, without blocking the training loop or failing with it."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..runtime.group.runtime import rank_of_this_process
from .general import GeneralTracker
from .values import plain

logger = logging.getLogger(__name__)

MAX_BACKLOG = 10_000
"""The largest number of waiting records. Beyond it `put` waits for a local tracker, and drops for a remote one."""
SECONDS_TO_BATCH = 0.05
"""How long the thread collects records: waking it for each of them would cost a short step several percent."""
RETRY_DELAYS = (1.0, 4.0, 16.0)
SECONDS_TO_FINISH = 60.0
SECONDS_BEFORE_WAIT_WARNING = 2.0
MAX_PERMANENT_ERRORS = 3

# [Note: two kinds of failures]
# A permanent failure is caused by the call (a value that the tracker cannot store, a bug in a custom tracker): a retry
# cannot help, but the next record may succeed. A transient failure is caused by the environment (no network, a full
# disk): the same record may succeed later. A permanent failure drops its record, a transient one is retried; either
# disables the tracker if it persists. The first failure and the end are logged, not every step.
PERMANENT_ERRORS = (
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    NotImplementedError,
    ImportError,
    AssertionError,
)

# [Note: who waits]
# A server may stall for minutes, and training must not: beyond the largest backlog records are dropped and counted.
# A file or a custom tracker is at most slower than a tight loop: there `put` waits until there is room. It never waits
# for a tracker that is disabled or being retried: that one recovers or is disabled within seconds.


class LoggedRecord:
    """The values of one call of `log`; tensors on an accelerator are converted to numbers on first read."""

    __slots__ = ("_materialized", "_values", "mark", "options", "step", "time")
    _lock = threading.Lock()

    def __init__(
        self, values: dict[str, Any], step: int | None, options: dict[str, dict[str, Any]], *, mark: str = ""
    ) -> None:
        self._values = values
        self._materialized = False
        self.step = step
        self.options = options
        self.mark = mark
        """The id of a checkpoint that was made at this point; such a record has no values."""
        self.time = time.time()

    def materialized(self) -> dict[str, Any]:
        """Return the values, with tensors of one element as numbers; the first call waits for the device."""
        if not self._materialized:
            with self._lock:
                if not self._materialized:
                    self._values = _with_scalars_as_numbers(self._values)
                    self._materialized = True
        return self._values


def _with_scalars_as_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_scalars_as_numbers(inner) for name, inner in value.items()}
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


class Writer:
    """A tracker, the thread that calls it, and the outcome of the calls."""

    def __init__(self, tracker: GeneralTracker, *, strict: bool = False) -> None:
        self.tracker = tracker
        self.name = str(getattr(tracker, "name", type(tracker).__name__))
        self.strict = strict
        self.error: Exception | None = None
        self.disabled = False
        self.lost = 0
        self._permanent_errors = 0
        self._got_records = False
        self._reported = False
        self._is_failing = False
        self._warned_of_wait = False
        self._queue: deque[LoggedRecord] = deque()
        self._in_flight: deque[LoggedRecord] = deque()
        """The records that the thread is writing; each is removed when the tracker has stored it."""
        self._condition = threading.Condition()
        self._flush_requested = False
        """A caller waits for the records, so that the thread does not collect more."""
        self._is_closing = False
        self._finishing = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def backlog(self) -> int:
        """The number of records that the tracker has not stored yet."""
        return len(self._queue) + len(self._in_flight)

    def begin(self, config: dict[str, Any] | None) -> None:
        """Open the run of the tracker, and store the config."""
        try:
            self._open(config)
        except Exception as error:
            if self.strict or isinstance(error, PERMANENT_ERRORS):
                raise
            self._disable(error, "could not start")
        else:
            if getattr(self.tracker, "in_background", True):
                self._thread = threading.Thread(target=self._run, name=f"tracker {self.name}", daemon=True)
                self._thread.start()

    def _open(self, config: dict[str, Any] | None) -> None:
        try:
            self.tracker.start()
        except Exception as error:
            if not getattr(self.tracker, "continued", None):
                raise
            self._warn(f"could not continue the run of the checkpoint ({_describe(error)}) and begins a new one")
            self.tracker.resume_run({}, self.tracker.next_step)
            self.tracker.start()
        if config is not None:
            self.tracker.store_init_configuration(config)

    def run(self) -> dict[str, Any]:
        """Return what another process needs to reopen the run."""
        try:
            return {} if self.disabled else dict(plain(self.tracker.run_identity()))
        except Exception as error:  # a tracker must not make a checkpoint fail
            self._warn(f"does not tell which run it writes ({_describe(error)}); a resume begins a new one")
            return {}

    def identity(self, mark: str) -> dict[str, Any]:
        """Return the identity of the run for a checkpoint, and mark the checkpoint in the run if the tracker can."""
        identity = self.run()
        if identity and hasattr(self.tracker, "mark_checkpoint"):
            self.put(LoggedRecord({}, None, {}, mark=mark))
            identity["mark"] = mark
        return identity

    def resume_run(self, identity: dict[str, Any], next_step: int, config: dict[str, Any] | None) -> None:
        """Close the current run, and reopen the run of a checkpoint."""
        if self.disabled or not identity:
            return
        self.drain(SECONDS_TO_FINISH)
        try:
            if self._got_records:
                self.tracker.finish()
            else:
                self.tracker.discard()
        except Exception as error:
            self._warn(f"could not close the run that the resume leaves: {_describe(error)}")
        try:
            self.tracker.resume_run(identity, next_step)
            self._open(config)
        except Exception as error:
            self._disable(error, "could not start again")

    def put(self, record: LoggedRecord) -> None:
        """Enqueue a record. It may wait or be dropped, see [Note: who waits]."""
        self._got_records = True
        if self._thread is None:
            self._flush(deque([record]))
        else:
            with self._condition:
                if self.backlog >= MAX_BACKLOG:
                    self._make_room()
                if self.disabled or (self.backlog >= MAX_BACKLOG and self._drops):
                    self.lost += 1
                else:
                    self._queue.append(record)
                    if len(self._queue) in (1, MAX_BACKLOG // 2):
                        self._condition.notify()
        self.raise_if_strict()

    @property
    def _drops(self) -> bool:
        return bool(getattr(self.tracker, "is_remote", False))

    def _make_room(self) -> None:
        """Wait for a local tracker; for a remote one warn, once, that records are dropped."""
        if self.disabled:
            return
        if self._drops:
            if self.lost == 0:
                self._warn(f"is too slow: {MAX_BACKLOG:,} records wait for it, and the next ones are left out")
            return
        until = time.monotonic() + SECONDS_BEFORE_WAIT_WARNING
        while self.backlog >= MAX_BACKLOG and not self.disabled and not self._is_failing:
            self._condition.wait(0.01)
            if not self._warned_of_wait and time.monotonic() > until:
                self._warned_of_wait = True
                self._warn(f"is slower than the run: {MAX_BACKLOG:,} records wait for it, and log() waits too")

    def raise_if_strict(self) -> None:
        """Raise the error of the tracker, in strict mode."""
        if self.error is not None and self.strict:
            error, self.error = self.error, None
            raise error

    def drain(self, seconds: float) -> bool:
        """Wait until all records are stored; return whether they are."""
        until = time.monotonic() + seconds
        with self._condition:
            self._flush_requested = True
            self._condition.notify()
        while self._thread is not None and self._thread.is_alive() and self.backlog:
            if time.monotonic() > until:
                break
            time.sleep(0.001)
        self._flush_requested = False
        return self._thread is None or not self._thread.is_alive() or not self.backlog

    def finish(self, *, ends_run: bool = True) -> None:
        """Store the remaining records, and close the run; without `ends_run` another process goes on with it."""
        seconds = SECONDS_TO_FINISH
        self._finishing.set()
        if not self.drain(min(2.0, seconds)):
            self._warn(f"still has {_count_of_records(self.backlog)} to write; waiting up to {seconds:.0f} s")
            if not self.drain(seconds):
                self._is_closing = self.disabled = True
                self.lost += self.backlog
                self._warn(f"did not take the last {_count_of_records(self.backlog)} in time")
                return
        if self._thread is not None:
            with self._condition:
                self._is_closing = True
                self._condition.notify_all()
            self._thread.join(seconds)
        if not self.disabled:
            try:
                if ends_run:
                    self.tracker.finish()
                else:
                    self.tracker.hand_over()
            except Exception as error:
                self._store_error(error)
                if not _script_has_failed():  # otherwise that failure is the one to report
                    self._warn(f"could not close its run: {_describe(error)}")
        if self.lost:
            self._warn(f"missed {_count_of_records(self.lost)} of this run")

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._queue or self._is_closing)
                if self._is_closing and (self.disabled or not self._queue):
                    return
                self._condition.wait_for(self._batch_is_ready, SECONDS_TO_BATCH)
                self._in_flight, self._queue = self._queue, self._in_flight
            self._flush(self._in_flight)

    def _batch_is_ready(self) -> bool:
        return self._flush_requested or self._is_closing or len(self._queue) >= MAX_BACKLOG // 2

    def _flush(self, records: deque[LoggedRecord]) -> None:
        """Write all records to the tracker, in one batch if it supports that."""
        take = _batch_log_of(self.tracker) or self._log_one
        pauses = iter(RETRY_DELAYS)
        while records and not self.disabled:
            try:
                take(records)
            except PERMANENT_ERRORS as error:
                if take != self._log_one and len(records) > 1:
                    take = self._log_one  # so that only the record that fails is dropped
                else:
                    records.popleft()
                    self._drop_record(error)
            except Exception as error:
                pause = next(pauses, None)
                if pause is None or self._thread is None or self._finishing.is_set():
                    self._disable(error, "failed again" if pause is None else "failed")
                else:
                    self._is_failing = True
                    self._report(error, f"It is tried again in {pause:.0f} s, and training continues.")
                    self._finishing.wait(pause)
            else:
                self._permanent_errors, self._is_failing, pauses = 0, False, iter(RETRY_DELAYS)
        if self.disabled and not self._is_closing:
            with self._condition:
                self.lost += len(records) + len(self._queue)
                records.clear()
                self._queue.clear()

    def _log_one(self, records: deque[LoggedRecord]) -> None:
        record = records[0]
        if record.mark:
            self.tracker.mark_checkpoint(record.mark)  # type: ignore[attr-defined]
        else:
            self.tracker.log(record.materialized(), step=record.step, **record.options.get(self.name, {}))
        records.popleft()

    def _drop_record(self, error: Exception) -> None:
        self.lost += 1
        self._permanent_errors += 1
        if self._permanent_errors >= MAX_PERMANENT_ERRORS:
            self._disable(error, f"refused {self._permanent_errors} records in a row")
        else:
            self._report(error, "The record is left out, and training continues.")

    def _report(self, error: Exception, consequence: str) -> None:
        self._store_error(error)
        if not self._reported:
            self._reported = True
            self._warn(f"raised {_describe(error)}. {consequence}{self._hint()}")

    def _disable(self, error: Exception, what: str) -> None:
        self._store_error(error)
        self.disabled = True
        hint = "" if self._reported else self._hint()
        self._warn(f"{what}: {_describe(error)}. Nothing more is logged there, and training continues.{hint}")
        self._reported = True

    def _store_error(self, error: Exception) -> None:
        self.error = self.error or error

    def _hint(self) -> str:
        if self._thread is None or type(self.tracker).__module__.startswith(("meshwright.", "accelerate.")):
            return ""
        return " If it must be called from the training thread, set in_background = False in its class."

    def _warn(self, what: str) -> None:
        logger.warning("[rank %d] the tracker %r %s.", rank_of_this_process(), self.name, what.removesuffix("."))


def _batch_log_of(tracker: GeneralTracker) -> Callable[[deque[LoggedRecord]], None] | None:
    """Return `log_all` of the tracker, unless a subclass or the object overrides `log`."""
    owner = next((c for c in type(tracker).__mro__ if {"log", "log_all"} & vars(c).keys()), object)
    if "log_all" not in vars(owner) or "log" in getattr(tracker, "__dict__", ()):
        return None
    return tracker.log_all  # type: ignore[attr-defined, no-any-return]


def _script_has_failed() -> bool:
    """Tell whether the script ended by an uncaught exception, after which clients often cannot finish."""
    return getattr(sys, "last_value", None) is not None


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().removesuffix(".")


def _count_of_records(count: int) -> str:
    return f"{count:,} record{'' if count == 1 else 's'}"
