"""The folder in host memory for the copies of a run, which outlives its processes and not its launcher."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...config.environment import patch_environment, variable_of
from ...config.launch.settings import LaunchSettings
from ...errors import LaunchError
from ...temporary import temporary_folder

SHARED_MEMORY = Path("/dev/shm")


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
    with (
        temporary_folder("copies", SHARED_MEMORY) as folder,
        patch_environment(**{variable_of("memory_copies_dir"): str(folder)}),
    ):
        yield
