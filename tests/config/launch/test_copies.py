"""Copies in memory that nobody could take up again are refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.config.launch.copies import refuse_copies
from meshwright.config.launch.settings import LaunchSettings
from meshwright.errors import UnsupportedSettingError


def refuse(method: str = "elastic", **flags: Any) -> None:
    refuse_copies(LaunchSettings.resolve(flags, None), method)


@pytest.mark.parametrize("method", ["elastic", "exec", "mpirun"])
def test_copies_of_a_launch_that_restarts_nothing_are_refused(method: str) -> None:
    with pytest.raises(
        UnsupportedSettingError, match=r"flag --memory_copies_every\) cannot be used: .* Use --max_restart"
    ):
        refuse(method, memory_copies_every=10)


def test_a_number_of_steps_below_one_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"memory_copies_every is 0 \(flag --memory_copies_every\): it must be 1 or more"
    ):
        refuse(memory_copies_every=0, max_restarts=1)


def test_copies_that_somebody_finds_are_not_refused() -> None:
    refuse(memory_copies_every=10, max_restarts=1)
    refuse("exec", memory_copies_every=10, memory_copies_dir="/dev/shm/run")
    refuse("srun", memory_copies_every=10)
    refuse("exec")
