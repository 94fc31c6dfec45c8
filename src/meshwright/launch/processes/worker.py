"""Run one rank's script as `python` would, and write a record of how it ended.

Runs as a script, before the user's code: it imports the standard library only, and not this package.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import os
import re
import runpy
import signal
import sys
import sysconfig
import threading
import time
import traceback
from contextlib import nullcontext, redirect_stderr, suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
LAUNCHER_PID = "MESHWRIGHT_LAUNCHER_PID"
DEBUG_RANK = "MESHWRIGHT_DEBUG_RANK"
CRASH_FILE_NAME = "crash.txt"
TRACEBACK_FILE_NAME = "traceback_rank_{rank}.txt"
DIAGNOSIS = "__accelerate_diagnosis__"
"""Attribute of an exception: the watcher's diagnosis of a lost peer."""
_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)


def main() -> None:
    """Run `worker.py [-m] SCRIPT ARGUMENT...`."""
    open_closed_streams()
    end_with_launcher()
    signal.signal(signal.SIGINT, interrupt)
    repeat_ignored_interrupts()
    # Line buffering: nothing is lost when the process is killed, and lines of two ranks do not mix.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    error_file = os.environ.get(ERROR_FILE)
    if error_file:
        # Stays open: on a signal such as SIGSEGV, faulthandler writes the Python stack to it.
        faulthandler.enable(file=open(Path(error_file).with_name(CRASH_FILE_NAME), "w"))  # noqa: SIM115
    is_debugged = os.environ.get(DEBUG_RANK, "") == os.environ.get("RANK")
    if os.environ.get(DEBUG_RANK) and not is_debugged:
        detach_from_terminal()
    arguments = sys.argv[1:]
    as_module = arguments[0] == "-m"
    sys.argv = arguments[as_module:]
    try:
        run_module(sys.argv[0]) if as_module else run_file(sys.argv[0])
    except SystemExit as ending:
        if ending.code not in (None, 0):
            write_record(ending, error_file)
        raise
    except BaseException as error:
        write_record(error, error_file)
        error.__traceback__ = without_launcher_frames(error.__traceback__)
        sys.last_value = error  # as Python does itself, so that exit handlers can see the failure
        report(error, error_file)
        if is_debugged and isinstance(error, Exception):
            debug(error)
        if hasattr(error, DIAGNOSIS):  # the watcher has added its diagnosis
            write_record(error, error_file)
        raise SystemExit(128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1) from None


def open_closed_streams() -> None:
    """Open the null device for closed standard streams (`2>&-`): another file would get their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            try:
                os.fstat(number)  # another file has the number already
            except OSError:
                os.dup2(null, number)
            if null == number:
                os.set_inheritable(null, True)
            else:
                os.close(null)
            stream = open(os.devnull, "w" if number else "r")  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def end_with_launcher() -> None:
    """Ask the kernel for SIGTERM when the launcher ends, for any reason (Linux)."""
    launcher = os.environ.get(LAUNCHER_PID)
    if sys.platform != "linux" or launcher is None:
        return
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(launcher):  # it ended before the call
        sys.exit(128 + signal.SIGTERM)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; inside `import torch`, which can swallow it, exit at once."""
    torch = sys.modules.get("torch")
    if getattr(getattr(torch, "__spec__", None), "_initializing", False):
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    raise KeyboardInterrupt


def repeat_ignored_interrupts() -> None:
    """Repeat an interrupt that Python ignored, as in a destructor, a callback or a fork hook."""
    own_process, hook = os.getpid(), sys.unraisablehook

    def on_ignored(ignored: sys.UnraisableHookArgs) -> None:
        if issubclass(ignored.exc_type, KeyboardInterrupt) and os.getpid() == own_process:
            again = threading.Timer(0.05, os.kill, (own_process, signal.SIGINT))  # after Python has left that code
            again.daemon = True
            again.start()
        else:
            hook(ignored)

    sys.unraisablehook = on_ignored


def detach_from_terminal() -> None:
    """Close standard input and disable breakpoints: another rank is debugged."""
    import pdb

    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.breakpointhook = pdb.set_trace = lambda *_, **__: None


def debug(error: Exception) -> None:
    """Open the debugger at an exception, unless it is the debugger's own quit."""
    import bdb
    import pdb

    if not isinstance(error, bdb.BdbQuit) and sys.stdin is not None and sys.stdin.isatty():
        pdb.post_mortem(error.__traceback__)


def run_file(path: str) -> None:
    """Execute a file as `__main__`, with its folder first on the path."""
    if os.path.isdir(path) or not path.endswith(".py"):
        sys.path.pop(0)
        runpy.run_path(path, run_name="__main__")
        return
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    program = ModuleType("__main__")
    program.__file__ = path
    program.__loader__ = SourceFileLoader("__main__", path)
    program.__dict__["__builtins__"] = __builtins__
    sys.modules["__accelerate_worker__"] = sys.modules["__main__"]
    sys.modules["__main__"] = program  # for pickle and multiprocessing
    exec(compile(Path(path).read_bytes(), path, "exec"), program.__dict__)


def run_module(name: str) -> None:
    """Execute a module as `python -m` does."""
    sys.path[0] = os.getcwd()
    sys.modules["__accelerate_worker__"] = sys.modules["__main__"]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def report(error: BaseException, error_file: str | None) -> None:
    """Call `sys.excepthook`. The traceback of a hang goes to a file: the launcher's panel says what it means."""
    log = None
    if error_file is not None and type(error).__name__ == "StuckError":
        name = TRACEBACK_FILE_NAME.format(rank=os.environ.get("RANK", "0"))
        with suppress(OSError):  # a full disk must not hide the error itself
            log = Path(error_file).with_name(name).open("w", encoding="utf-8")
    with log or nullcontext(), redirect_stderr(log) if log else nullcontext():
        sys.excepthook(type(error), error, error.__traceback__)


def error_record(error: BaseException) -> dict[str, Any]:
    """Return the record of an error that ends a rank: `Ending.record`."""
    return {
        "type": type(error).__name__,
        "text": "".join(traceback.format_exception_only(type(error), error)).strip(),
        "cause": _root_cause(error),
        "diagnosis": getattr(error, DIAGNOSIS, None),
        "frames": user_frames(error),
        "time": time.time(),
    }


def write_record(error: BaseException, error_file: str | None) -> None:
    """Write the record to torchelastic's error file, with the frames of the user's own code."""
    if error_file is None:
        return
    ending = error_record(error)
    whole = "".join(traceback.format_exception(type(error), error, without_launcher_frames(error.__traceback__)))
    extra = {"py_callstack": whole, "timestamp": str(int(time.time()))}
    try:
        Path(error_file).write_text(
            json.dumps({"message": {"message": ending["text"], "extraInfo": extra}, "ending": ending})
        )
    except OSError:  # a full disk must not hide the error itself
        traceback.print_exc()


def _root_cause(error: BaseException) -> str | None:
    root = error
    while (earlier := root.__cause__ or (None if root.__suppress_context__ else root.__context__)) is not None:
        root = earlier
    return None if root is error else "".join(traceback.format_exception_only(type(root), root)).strip()


def without_launcher_frames(trace: TracebackType | None) -> TracebackType | None:
    """Drop the frames of this file and of runpy from the start of a traceback."""
    while trace is not None and _is_launcher_file(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _is_launcher_file(filename: str) -> bool:
    return filename in (__file__, runpy.__file__) or filename.startswith("<frozen ")


def user_frames(error: BaseException) -> list[dict[str, Any]]:
    """Return the last frames of the user's own files; without any, the last frames of all."""
    trace = traceback.extract_tb(without_launcher_frames(error.__traceback__))
    frames = [_frame(frame.filename, frame.lineno or 0, frame.name) for frame in trace]
    if isinstance(error, SyntaxError) and error.filename is not None:
        frames.append(_frame(error.filename, error.lineno or 0, "<module>"))
    # The traceback of a data worker is text inside another exception.
    frames += [_frame(found["file"], int(found["line"]), found["function"]) for found in _FRAME.finditer(str(error))]
    return ([frame for frame in frames if is_user_file(frame["file"])] or frames)[-4:]


def _frame(file: str, line: int, function: str) -> dict[str, Any]:
    return {"file": file, "line": line, "function": function, "source": linecache.getline(file, line).strip()}


def is_user_file(file: str) -> bool:
    """Return whether a file is the user's own: not Python's, not an installed package's, not this package's."""
    if file.startswith("<"):
        return False
    here = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths = sysconfig.get_paths()
    foreign = (paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"], here)
    return not os.path.abspath(file).startswith(tuple(os.path.join(path, "") for path in foreign))


if __name__ == "__main__":
    main()
