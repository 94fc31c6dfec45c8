"""How much the tests do: bounded in the gate, in full size at night (`MESHWRIGHT_TEST_PROFILE=nightly`)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

Size = TypeVar("Size")

PROFILE = os.environ.get("MESHWRIGHT_TEST_PROFILE", "gate")
if PROFILE not in ("gate", "nightly"):
    raise ValueError(f"MESHWRIGHT_TEST_PROFILE={PROFILE}: expected gate or nightly")


def sized(*, gate: Size, nightly: Size) -> Size:
    """Return the size of a test in this profile."""
    return nightly if PROFILE == "nightly" else gate


def at_night(*values: Any) -> Any:
    """Return values of a parametrized test that the gate leaves out: other values prove the same in it."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def cases(*, gate: Iterable[Any], nightly: Iterable[Any]) -> list[Any]:
    """Return the values of a parametrized test: those of the gate, and the others that are for the night."""
    kept = list(gate)
    rest = [value for value in nightly if value not in kept]
    return [*kept, *(at_night(*(value if isinstance(value, tuple) else (value,))) for value in rest)]


on_two_processes = pytest.mark.parametrize("world_size", [at_night(1), 2])
"""On two processes; at night also on one."""
