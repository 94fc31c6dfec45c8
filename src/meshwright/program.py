"""The name by which this package was called, so that messages tell users what they can type."""

from __future__ import annotations

import os
import sys

_VARIABLE = "MESHWRIGHT_PROGRAM"
_NAMES = ("meshwright", "accelerate")


def program_name() -> str:
    """Return the command that started this process or its launcher: `meshwright`, or `accelerate`."""
    called = os.path.basename(sys.argv[0] if sys.argv else "").removesuffix(".exe").split("-")[0]
    if called in _NAMES:
        return called
    passed_on = os.environ.get(_VARIABLE)
    return passed_on if passed_on in _NAMES else _NAMES[0]


def pass_on_program_name() -> None:
    """Let the processes that this one starts say the same name."""
    os.environ[_VARIABLE] = program_name()
