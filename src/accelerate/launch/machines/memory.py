"""The folder in host memory for the copies of a run, which outlives its processes and not its launcher."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...config.environment import patch_environment, variable_of
from ...config.launch.settings import LaunchSettings
from ...errors import LaunchError

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "accelerate-copies-"
LOCK_FILE = "launcher.lock"


@contextmanager
def copies_of(settings: LaunchSettings) -> Iterator[None]:
    """Give the processes a folder for their copies, and remove it at the end; a folder of the user's stays."""
    if settings.memory_copies_every is None or settings.memory_copies_dir is not None:
        yield
        return
    if not os.access(SHARED_MEMORY, os.W_OK):
        raise LaunchError(
            f"Copies in memory need a folder in host memory, and {SHARED_MEMORY} does not exist or cannot be written. "
            "Mount a tmpfs, and give a folder in it by --memory_copies_dir."
        )
    import fcntl  # Windows has no such module

    _remove_folders_of_ended_launchers()
    folder = Path(tempfile.mkdtemp(prefix=f"new-{PREFIX}", dir=SHARED_MEMORY))
    try:
        with (folder / LOCK_FILE).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            folder = folder.rename(folder.with_name(folder.name.removeprefix("new-")))  # another launcher may look now
            with patch_environment(**{variable_of("memory_copies_dir"): str(folder)}):
                yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_folders_of_ended_launchers() -> None:
    """Free the memory of launchers that were killed: the system released the locks that they held."""
    import fcntl

    for lock_file in SHARED_MEMORY.glob(f"{PREFIX}*/{LOCK_FILE}"):
        with suppress(OSError), lock_file.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock_file.parent, ignore_errors=True)
