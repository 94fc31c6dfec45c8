"""Temporary folders that are removed even if the process that made them was killed.

`new_folder` makes a folder that only this user can read, and locks it. The system releases the lock when the process
ends, however it ends; whoever makes the next one removes the folders of this user that nobody has locked. Other users
can write to the parent, too: what is another user's, a link, or not of such a name is not opened or followed.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

fcntl: Any = None
with suppress(ImportError):  # on Windows, where folders of killed processes stay
    import fcntl

_NAME = re.compile(r"meshwright-[a-z]+-[a-z0-9_]{8,32}\.temporary")
_locks: dict[Path, int] = {}


def new_folder(purpose: str, parent: str | os.PathLike[str] | None = None) -> Path:
    """Make a folder in `parent`, or else where the system keeps temporary files; `remove_folder` deletes it."""
    parent = tempfile.gettempdir() if parent is None else os.path.abspath(parent)
    _remove_abandoned(parent)
    while True:
        folder = Path(tempfile.mkdtemp(".temporary", f"meshwright-{purpose}-", parent))
        if _locked(folder):
            return folder


def remove_folder(folder: Path) -> None:
    """Delete a folder that `new_folder` made, as far as possible."""
    shutil.rmtree(folder, ignore_errors=True)
    lock = _locks.pop(folder, None)
    if lock is not None:
        os.close(lock)


@contextmanager
def temporary_folder(purpose: str, parent: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """Make a folder for the block.

    Unlike one of `tempfile.TemporaryDirectory`, it is not deleted by the first forked process that ends.
    """
    folder = new_folder(purpose, parent)
    try:
        yield folder
    finally:
        remove_folder(folder)


class Hold:
    """Mark a folder as in use until `release`, or until the process ends. Several processes may mark one."""

    def __init__(self, folder: Path) -> None:
        self._descriptor: int | None = None
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks
                self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def release(self) -> None:
        """Take the mark away."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    __del__ = release


def is_held(folder: Path) -> bool:
    """Tell whether a folder is marked by a `Hold`."""
    if fcntl is None:
        return False
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False


@contextmanager
def locked(folder: Path, seconds: float) -> Iterator[None]:
    """Let one process at a time run the block; without the lock after so many seconds, or where there are no locks."""
    descriptor: int | None = None
    if fcntl is not None:
        until = time.monotonic() + seconds
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            while not _is_locked_now(descriptor) and time.monotonic() < until:
                time.sleep(0.01)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _is_locked_now(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _locked(folder: Path) -> bool:
    """Lock a new folder; return whether it is still there: another process may have taken it for an abandoned one."""
    if fcntl is None:
        return True
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # this file system has no locks: nobody can lock the folder to remove it
    if not folder.is_dir():
        os.close(lock)
        return False
    _locks[folder] = lock
    return True


def _remove_abandoned(parent: str) -> None:
    if fcntl is None:
        return
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                with suppress(OSError):
                    _remove_if_abandoned(entry.path)


def _remove_if_abandoned(folder: str) -> None:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if os.fstat(lock).st_uid == os.getuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
