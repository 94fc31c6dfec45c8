"""Every module can be imported on systems that lack what Linux has: Windows and macOS."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

IMPORT_ALL = """
import importlib, os, pkgutil, signal, sys
import accelerate

def import_all():
    for module in pkgutil.walk_packages(accelerate.__path__, "accelerate."):
        if module.name not in ("accelerate.utils.rich", "meshwright.launch.processes.worker"):
            importlib.import_module(module.name)

import_all()  # with everything of other packages, which know the system they run on
for name in [name for name in sys.modules if name.partition(".")[0] == "accelerate"]:
    del sys.modules[name]
for module, names in LACKING.items():
    if names is None:
        sys.modules[module] = None
    for name in names or ():
        if hasattr(sys.modules[module], name):
            delattr(sys.modules[module], name)
failures = []
for module in ["accelerate", *(m.name for m in pkgutil.walk_packages(accelerate.__path__, "accelerate."))]:
    if module not in ("accelerate.utils.rich", "meshwright.launch.processes.worker"):
        try:
            importlib.import_module(module)
        except Exception as error:
            failures.append(f"{module}: {type(error).__name__}: {error}")
print(*failures, sep="\\n")
"""
"""The first module is rich's switch; importing the second one begins the work of a process that the launcher starts."""

_WINDOWS_HAS = {"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM", "SIG_DFL", "SIG_IGN"}
_PROCESSES = (
    "fork forkpty killpg setsid setpgid setpgrp getpgid getpgrp wait3 wait4 waitid WNOHANG register_at_fork nice"
)
_FILES = "pread preadv pwrite pwritev posix_fadvise posix_fallocate sendfile statvfs mkfifo fchown chown getuid geteuid"
_LINUX = "sched_getaffinity sched_setaffinity memfd_create preadv pwritev posix_fadvise O_DIRECT eventfd pidfd_open"


def lacking() -> dict[str, list[str] | None]:
    """Return what Windows lacks, and macOS in part: modules, and names of modules."""
    modules = ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "readline", "curses", "syslog")
    signals = [name for name in dir(signal) if name.startswith("SIG") and name not in _WINDOWS_HAS]
    functions = ["pthread_sigmask", "pthread_kill", "setitimer", "alarm", "sigwait", "siginterrupt", "strsignal"]
    return {
        "os": [*_PROCESSES.split(), *_FILES.split(), *_LINUX.split(), "uname", "sysconf", "openpty"],
        "signal": [*signals, *functions],
        **dict.fromkeys(modules),
    }


def test_every_module_can_be_imported_without_what_only_linux_has(tmp_path: Path) -> None:
    code = f"LACKING = {lacking()!r}\n{IMPORT_ALL}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (ended.returncode, ended.stdout.strip()) == (0, ""), ended.stdout + ended.stderr[-2000:]
