"""Raise an error in a thread, wherever it waits."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from ...config.environment import read
from ...errors import StuckError
from ...runtime.group import aborting

SECONDS_TO_RAISE = 3.5
"""A thread that has not returned to Python by then is in a native call that nothing can interrupt."""
SECONDS_BEFORE_FIRST_EXIT = 0.5
SECONDS_FOR_EXIT_HOOKS = 2.0

# [Note: which rank exits first]
# NCCL's waits end when the process group is aborted. Gloo's do not: they end when the other side closes the connection.
# If every rank waits inside gloo, one of them has to exit without returning to Python; its connections close, the
# waits of the others end, and their scripts see the error. The highest rank does it: it writes no logs or checkpoints.
# Its own thread may return at the same moment, because other ranks have exited too; it then sleeps until the exit.

# [Note: traced threads]
# A pending asynchronous exception or signal makes CPython 3.11 repeat the first instruction of a function that another
# thread calls under a tracer (a debugger, coverage), until it is delivered. So tracing is disabled from then on, in
# this thread and in the one that runs the exit hooks.


class Interrupter:
    """Raise an error in a thread: in the main thread by a signal, which also interrupts locks; in others as they run.

    Collectives are interrupted by aborting their process groups.
    """

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread
        self.is_exiting = False
        """Whether the process is being ended without the thread."""
        self._message = ""
        self._report_once = threading.Lock()
        """Acquired once, by the side that reports the error: the thread itself, or `_exit_process` in its place."""
        self._signal = _free_signal() if thread is threading.main_thread() is threading.current_thread() else None
        if self._signal is not None:
            signal.signal(self._signal, self._on_signal)

    def close(self) -> None:
        """Remove the signal handler, unless another one has replaced it."""
        if self._has_signal() and threading.current_thread() is threading.main_thread():
            signal.signal(self._signal, signal.SIG_DFL)  # type: ignore[arg-type]

    def disarm(self) -> None:
        """Raise nothing in the calling thread from now on: it reports its error by itself."""
        self._claim_report()

    def interrupt(self, thread: threading.Thread, message: str, *, exits_first: bool) -> None:
        """Make another thread raise a `StuckError`. See [Note: which rank exits first]."""
        self._thread, self._message = thread, message
        sys.settrace(None)  # see [Note: traced threads]
        sys.setprofile(None)
        if not self._report_once.locked():
            self._send()
        deadline = time.monotonic() + (SECONDS_BEFORE_FIRST_EXIT if exits_first else SECONDS_TO_RAISE)
        while time.monotonic() < deadline:
            if self._report_once.locked() or not self._thread.is_alive():
                return
            with suppress(Exception):  # a backend without it: the exit of other ranks ends the wait
                aborting.abort(aborting.open_groups())
            time.sleep(0.1)
        self.is_exiting = self._report_once.acquire(blocking=False)
        if self.is_exiting:
            self._exit_process()

    def _has_signal(self) -> bool:
        return self._signal is not None and signal.getsignal(self._signal) == self._on_signal

    def _send(self) -> None:
        thread = self._thread.ident or 0
        if self._has_signal():
            signal.pthread_kill(thread, self._signal)  # type: ignore[arg-type]
            return
        claim_report, text = self._claim_report, self._message

        class InjectedError(StuckError):
            """Python creates the instance in the other thread, without arguments."""

            def __init__(self) -> None:
                claim_report()
                super().__init__(text)

        InjectedError.__name__ = InjectedError.__qualname__ = StuckError.__name__
        InjectedError.__module__ = StuckError.__module__
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(InjectedError))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._claim_report():
            raise StuckError(self._message)

    def _claim_report(self) -> bool:
        """Return whether the calling thread is the one to report; if the process is exiting, sleep until it has."""
        claimed = self._report_once.acquire(blocking=False)
        if not claimed and self.is_exiting:
            time.sleep(10 * SECONDS_FOR_EXIT_HOOKS)
        return claimed

    def _exit_process(self) -> None:
        """End the process as if the thread had raised where it is."""
        trace = _traceback(sys._current_frames().get(self._thread.ident or 0))
        error = StuckError(self._message).with_traceback(trace)
        worker: Any = sys.modules.get("__accelerate_worker__")
        if worker is None:
            with suppress(Exception):
                sys.excepthook(StuckError, error, trace)
        else:  # it keeps the launcher's record of how this rank ended
            with suppress(Exception):
                worker.report(error, read(worker.ERROR_FILE))
            with suppress(Exception):
                worker.write_record(error, read(worker.ERROR_FILE))
        threading.settrace(None)  # see [Note: traced threads]
        exit_hooks = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
        exit_hooks.start()
        exit_hooks.join(SECONDS_FOR_EXIT_HOOKS)  # a hook may wait for other ranks
        os._exit(1)


def _free_signal() -> int | None:
    """Return a real-time signal without a handler, or None where there are no such signals."""
    if not hasattr(signal, "SIGRTMIN"):
        return None
    numbers = range(signal.SIGRTMIN + 7, signal.SIGRTMAX)
    return next((number for number in numbers if signal.getsignal(number) is signal.SIG_DFL), None)


def _traceback(innermost: FrameType | None) -> TracebackType | None:
    trace, frame = None, innermost
    while frame is not None:
        trace = TracebackType(trace, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return trace
