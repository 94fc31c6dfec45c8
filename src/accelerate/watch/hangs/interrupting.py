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

import torch.distributed as dist

from ...config.environment import read
from ...errors import StuckError

SECONDS_TO_RAISE = 3.5
"""A thread that has not come back by then is in a native call that nothing can end."""
SECONDS_BEFORE_THE_FIRST_LEAVES = 0.5
SECONDS_FOR_LAST_WORDS = 2.0

# [Note: who leaves first]
# NCCL's waits end when the group is aborted. Gloo's do not: they end when the other side of a connection is closed.
# If every rank waits inside gloo, one of them has to leave without coming back to Python; its connections close, the
# others' waits end, and their scripts see the error. The highest rank does it: it writes no logs and no checkpoints.
# Its own thread may come back at that very moment, because others have left too: it then holds still until the end.

# [Note: traced threads]
# An error or a signal that waits for one thread makes CPython 3.11 repeat the first instruction of a function that
# another thread calls under a tracer (a debugger, coverage), for as long as it waits. So from then on this thread, and
# the one it starts for its last words, go untraced.


class Interrupter:
    """Make a thread raise: the main thread by a signal, which ends waits for locks too; another as soon as it runs.

    Collectives are ended by aborting their groups.
    """

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread
        self.leaves = False
        """Whether the process is being ended without the thread."""
        self._message = ""
        self._telling = threading.Lock()
        """Taken once, by whoever tells: the thread itself, or `_leave` in its place."""
        self._signal = _free_signal() if thread is threading.main_thread() is threading.current_thread() else None
        if self._signal is not None:
            signal.signal(self._signal, self._on_signal)

    def close(self) -> None:
        """Take the handler away, unless somebody has put another one in its place."""
        if self._has_signal() and threading.current_thread() is threading.main_thread():
            signal.signal(self._signal, signal.SIG_DFL)  # type: ignore[arg-type]

    def spare(self) -> None:
        """Raise nothing from now on in the thread that calls: it tells by itself."""
        self._take_the_telling()

    def interrupt(self, thread: threading.Thread, message: str, *, leaves_first: bool) -> None:
        """Make another thread raise a `StuckError`. See [Note: who leaves first]."""
        self._thread, self._message = thread, message
        sys.settrace(None)  # see [Note: traced threads]
        sys.setprofile(None)
        if not self._telling.locked():
            self._send()
        until = time.monotonic() + (SECONDS_BEFORE_THE_FIRST_LEAVES if leaves_first else SECONDS_TO_RAISE)
        while time.monotonic() < until:
            if self._telling.locked() or not self._thread.is_alive():
                return
            _abort_groups()
            time.sleep(0.1)
        self.leaves = self._telling.acquire(blocking=False)
        if self.leaves:
            self._leave()

    def _has_signal(self) -> bool:
        return self._signal is not None and signal.getsignal(self._signal) == self._on_signal

    def _send(self) -> None:
        thread = self._thread.ident or 0
        if self._has_signal():
            signal.pthread_kill(thread, self._signal)  # type: ignore[arg-type]
            return
        tell, text = self._take_the_telling, self._message

        class Told(StuckError):
            """Python makes the instance itself, in the other thread, without arguments."""

            def __init__(self) -> None:
                tell()
                super().__init__(text)

        Told.__name__ = Told.__qualname__ = StuckError.__name__
        Told.__module__ = StuckError.__module__
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Told))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._take_the_telling():
            raise StuckError(self._message)

    def _take_the_telling(self) -> bool:
        """Take it for the thread that calls, unless it has it already; if `_leave` has it, hold still until the end."""
        taken = self._telling.acquire(blocking=False)
        if not taken and self.leaves:
            time.sleep(10 * SECONDS_FOR_LAST_WORDS)
        return taken

    def _leave(self) -> None:
        """End the process as if the thread had raised where it stands."""
        trace = _traceback(sys._current_frames().get(self._thread.ident or 0))
        error = StuckError(self._message).with_traceback(trace)
        with suppress(Exception):
            sys.excepthook(StuckError, error, trace)
        with suppress(Exception):  # the launcher's record of how this rank ended
            worker: Any = sys.modules["__accelerate_worker__"]
            worker.record(error, read(worker.ERROR_FILE))
        threading.settrace(None)  # see [Note: traced threads]
        last_words = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
        last_words.start()
        last_words.join(SECONDS_FOR_LAST_WORDS)  # one of them may wait for other ranks
        os._exit(1)


def _free_signal() -> int | None:
    """Return a real-time signal that nobody handles, or None where there are no such signals."""
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


def _abort_groups() -> None:
    if dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            with suppress(Exception):  # a backend without it: the others' leaving ends the wait
                if dist.get_backend(group) != "gloo":  # which cannot, and may block whoever asks
                    group.abort()
