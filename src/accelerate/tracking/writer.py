"""Hand records to one tracker without making the training loop wait for it, or fall with it."""

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

LARGEST_BACKLOG = 10_000
"""Records that may wait for a tracker. Then `put` waits for a local one, and leaves records out for a remote one."""
SECONDS_TO_GATHER = 0.05
"""For how long the thread lets records gather: waking it for each of them would cost a short step several percent."""
SECONDS_BETWEEN_TRIES = (1.0, 4.0, 16.0)
SECONDS_TO_FINISH = 60.0
SECONDS_BEFORE_A_WAIT_IS_TOLD = 2.0
WRONG_CALLS_IN_A_ROW = 3

# [Note: two kinds of failures]
# A tracker fails because the call is wrong (a value it cannot take, a bug in a hand-written tracker): trying again
# cannot help, and the next record may be fine. Or because the world is wrong (no network, a full disk): the same record
# may pass in a moment. The first kind costs its record, the second is tried again; either disables the tracker when
# it does not end. The user hears of the first failure and of the end, not of every step.
WRONG_CALL = (TypeError, ValueError, AttributeError, LookupError, NotImplementedError, ImportError, AssertionError)

# [Note: who waits]
# A server may stall for minutes, and training must not: beyond the largest backlog records are left out and counted.
# A file or a hand-written tracker is only slower than a tight loop: there `put` waits until there is room, as it did
# when `log` called the tracker itself. It never waits for a tracker that is disabled, or that is failing and tried
# again: that one is back or disabled within seconds.


class Record:
    """What one call of `log` said; tensors of an accelerator become numbers when somebody reads them."""

    __slots__ = ("_settled", "_values", "mark", "options", "step", "time")
    _lock = threading.Lock()

    def __init__(
        self, values: dict[str, Any], step: int | None, options: dict[str, dict[str, Any]], *, mark: str = ""
    ) -> None:
        self._values = values
        self._settled = False
        self.step = step
        self.options = options
        self.mark = mark
        """The id of a checkpoint that was made at this moment; then it has no values."""
        self.time = time.time()

    def settled(self) -> dict[str, Any]:
        """Return the values with numbers for tensors of one element; waits for the device the first time."""
        if not self._settled:
            with self._lock:
                if not self._settled:
                    self._values = _numbers(self._values)
                    self._settled = True
        return self._values


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
        self._got_records = False
        self._reported = False
        self._is_failing = False
        self._told_wait = False
        self._waiting: deque[Record] = deque()
        self._taken: deque[Record] = deque()
        """What the thread has in hand; a record leaves it when the tracker has it."""
        self._change = threading.Condition()
        self._is_wanted = False
        """Somebody waits for the records: they gather no longer."""
        self._is_ending = False
        self._hurry = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def backlog(self) -> int:
        """How many records the tracker has not taken yet."""
        return len(self._waiting) + len(self._taken)

    def begin(self, config: dict[str, Any] | None) -> None:
        """Open the tracker's run and store the config."""
        try:
            self._open(config)
        except Exception as error:
            if self.strict or isinstance(error, WRONG_CALL):
                raise
            self._disable(error, "could not start")
        else:
            if getattr(self.tracker, "in_background", True):
                self._thread = threading.Thread(target=self._work, name=f"tracker {self.name}", daemon=True)
                self._thread.start()

    def _open(self, config: dict[str, Any] | None) -> None:
        try:
            self.tracker.start()
        except Exception as error:
            if not getattr(self.tracker, "continued", None):
                raise
            self._say(f"could not continue the run of the checkpoint ({_shown(error)}) and begins a new one")
            self.tracker.go_on({}, self.tracker.next_step)
            self.tracker.start()
        if config is not None:
            self.tracker.store_init_configuration(config)

    def identity(self, mark: str) -> dict[str, Any]:
        """Return what a checkpoint keeps of the run, and mark the checkpoint in it where the tracker can."""
        try:
            identity: dict[str, Any] = {} if self.disabled else plain(self.tracker.run_identity())
        except Exception as error:  # a tracker must not cost a checkpoint
            self._say(f"does not tell which run it writes ({_shown(error)}); a resume begins a new one")
            return {}
        if identity and hasattr(self.tracker, "mark_checkpoint"):
            self.put(Record({}, None, {}, mark=mark))
            identity["mark"] = mark
        return identity

    def go_on(self, identity: dict[str, Any], next_step: int, config: dict[str, Any] | None) -> None:
        """Leave the run that was opened, and open that of a checkpoint again."""
        if self.disabled or not identity:
            return
        self.drain(SECONDS_TO_FINISH)
        try:
            if self._got_records:
                self.tracker.finish()
            else:
                self.tracker.discard()
        except Exception as error:
            self._say(f"could not close the run that the resume leaves: {_shown(error)}")
        try:
            self.tracker.go_on(identity, next_step)
            self._open(config)
        except Exception as error:
            self._disable(error, "could not start again")

    def put(self, record: Record) -> None:
        """Take a record over. Who waits here, and who loses it, is told in [Note: who waits]."""
        self._got_records = True
        if self._thread is None:
            self._hand_over(deque([record]))
        else:
            with self._change:
                if self.backlog >= LARGEST_BACKLOG:
                    self._make_room()
                if self.disabled or (self.backlog >= LARGEST_BACKLOG and self._drops):
                    self.lost += 1
                else:
                    self._waiting.append(record)
                    if len(self._waiting) in (1, LARGEST_BACKLOG // 2):
                        self._change.notify()
        self.raise_if_strict()

    @property
    def _drops(self) -> bool:
        return bool(getattr(self.tracker, "is_remote", False))

    def _make_room(self) -> None:
        """Wait for a local tracker; of a remote one say, once, that it is left behind."""
        if self.disabled:
            return
        if self._drops:
            if self.lost == 0:
                self._say(f"is too slow: {LARGEST_BACKLOG:,} records wait for it, and the next ones are left out")
            return
        until = time.monotonic() + SECONDS_BEFORE_A_WAIT_IS_TOLD
        while self.backlog >= LARGEST_BACKLOG and not self.disabled and not self._is_failing:
            self._change.wait(0.01)
            if not self._told_wait and time.monotonic() > until:
                self._told_wait = True
                self._say(f"is slower than the run: {LARGEST_BACKLOG:,} records wait for it, and log() waits too")

    def raise_if_strict(self) -> None:
        """Raise what went wrong in the tracker, if that was asked for."""
        if self.error is not None and self.strict:
            error, self.error = self.error, None
            raise error

    def drain(self, seconds: float) -> bool:
        """Wait until everything that was logged has arrived; tell whether it did."""
        until = time.monotonic() + seconds
        with self._change:
            self._is_wanted = True
            self._change.notify()
        while self._thread is not None and self._thread.is_alive() and self.backlog:
            if time.monotonic() > until:
                break
            time.sleep(0.001)
        self._is_wanted = False
        return self._thread is None or not self._thread.is_alive() or not self.backlog

    def finish(self) -> None:
        """Let the tracker take what is left, and close its run."""
        seconds = SECONDS_TO_FINISH
        self._hurry.set()
        if not self.drain(min(2.0, seconds)):
            self._say(f"still has {_records(self.backlog)} to write; waiting up to {seconds:.0f} s")
            if not self.drain(seconds):
                self._is_ending = self.disabled = True
                self.lost += self.backlog
                self._say(f"did not take the last {_records(self.backlog)} in time")
                return
        if self._thread is not None:
            with self._change:
                self._is_ending = True
                self._change.notify_all()
            self._thread.join(seconds)
        if not self.disabled:
            try:
                self.tracker.finish()
            except Exception as error:
                self._keep(error)
                if not _script_has_failed():  # else that failure is what its output has to say
                    self._say(f"could not close its run: {_shown(error)}")
        if self.lost:
            self._say(f"missed {_records(self.lost)} of this run")

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._waiting or self._is_ending)
                if self._is_ending and (self.disabled or not self._waiting):
                    return
                self._change.wait_for(self._has_gathered, SECONDS_TO_GATHER)
                self._taken, self._waiting = self._waiting, self._taken
            self._hand_over(self._taken)

    def _has_gathered(self) -> bool:
        return self._is_wanted or self._is_ending or len(self._waiting) >= LARGEST_BACKLOG // 2

    def _hand_over(self, records: deque[Record]) -> None:
        """Have the tracker take all records: at once where it can, so that one write stores all that wait."""
        take = _takes_all(self.tracker) or self._log_first
        pauses = iter(SECONDS_BETWEEN_TRIES)
        while records and not self.disabled:
            try:
                take(records)
            except WRONG_CALL as error:
                if take != self._log_first and len(records) > 1:
                    take = self._log_first  # only the wrong one is left out
                else:
                    records.popleft()
                    self._give_up_record(error)
            except Exception as error:
                pause = next(pauses, None)
                if pause is None or self._thread is None or self._hurry.is_set():
                    self._disable(error, "failed again" if pause is None else "failed")
                else:
                    self._is_failing = True
                    self._report(error, f"It is tried again in {pause:.0f} s, and training continues.")
                    self._hurry.wait(pause)
            else:
                self._wrong_calls, self._is_failing, pauses = 0, False, iter(SECONDS_BETWEEN_TRIES)
        if self.disabled and not self._is_ending:
            with self._change:
                self.lost += len(records) + len(self._waiting)
                records.clear()
                self._waiting.clear()

    def _log_first(self, records: deque[Record]) -> None:
        record = records[0]
        if record.mark:
            self.tracker.mark_checkpoint(record.mark)  # type: ignore[attr-defined]
        else:
            self.tracker.log(record.settled(), step=record.step, **record.options.get(self.name, {}))
        records.popleft()

    def _give_up_record(self, error: Exception) -> None:
        self.lost += 1
        self._wrong_calls += 1
        if self._wrong_calls >= WRONG_CALLS_IN_A_ROW:
            self._disable(error, f"refused {self._wrong_calls} records in a row")
        else:
            self._report(error, "The record is left out, and training continues.")

    def _report(self, error: Exception, consequence: str) -> None:
        self._keep(error)
        if not self._reported:
            self._reported = True
            self._say(f"raised {_shown(error)}. {consequence}{self._hint()}")

    def _disable(self, error: Exception, what: str) -> None:
        self._keep(error)
        self.disabled = True
        hint = "" if self._reported else self._hint()
        self._say(f"{what}: {_shown(error)}. Nothing more is logged there, and training continues.{hint}")
        self._reported = True

    def _keep(self, error: Exception) -> None:
        self.error = self.error or error

    def _hint(self) -> str:
        if self._thread is None or type(self.tracker).__module__.startswith("accelerate."):
            return ""
        return " If it must be called from the training thread, set in_background = False in its class."

    def _say(self, what: str) -> None:
        logger.warning("[rank %d] the tracker %r %s.", rank_of_this_process(), self.name, what.removesuffix("."))


def _takes_all(tracker: GeneralTracker) -> Callable[[deque[Record]], None] | None:
    """Return the tracker's `log_all`, unless a class below it or the object itself has another `log`."""
    owner = next((c for c in type(tracker).__mro__ if {"log", "log_all"} & vars(c).keys()), object)
    if "log_all" not in vars(owner) or "log" in getattr(tracker, "__dict__", ()):
        return None
    return tracker.log_all  # type: ignore[attr-defined, no-any-return]


def _script_has_failed() -> bool:
    """Tell whether Python has printed an exception that nobody caught: clients often cannot finish after one."""
    return getattr(sys, "last_value", None) is not None


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().removesuffix(".")


def _records(count: int) -> str:
    return f"{count:,} record{'' if count == 1 else 's'}"
