"""Refuse copies in memory that nobody could take up again."""

from __future__ import annotations

from ...errors import UnsupportedSettingError
from .settings import LaunchSettings


def refuse_copies(settings: LaunchSettings, method: str) -> None:
    """Raise if a launch with `--memory_copies_every` would make copies that no later process finds."""
    every = settings.memory_copies_every
    if every is None:
        return
    origin = settings.origin("memory_copies_every")
    if every < 1:
        raise ValueError(f"memory_copies_every is {every} ({origin}): it must be 1 or more.")
    if settings.memory_copies_dir is not None or method == "srun":  # srun starts a launcher on each machine
        return
    if method != "elastic" or settings.max_restarts == 0:
        raise UnsupportedSettingError(
            f"memory_copies_every ({origin})",
            "this launcher restarts nothing, and removes the copies when it ends.",
            "Use --max_restarts N, or --memory_copies_dir DIR for copies that the next launch finds.",
        )
