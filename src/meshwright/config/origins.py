"""Values with their origins. A small module, so that the command line need not import the training settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..program import program_name
from ..untrusted import parse_object
from .environment import read, read_setting, variable_of

NOT_YET = "this version of the library does not have it yet."
ORIGINS_VARIABLE = "MESHWRIGHT_LAUNCH_ORIGINS"
"""Carries into the processes where `meshwright launch` took each setting from: option -> origin, as JSON."""


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A value and where it came from."""

    value: Any
    origin: str


def resolve(setting: str, in_code: Any, default: Any) -> Resolved:
    """Choose a value: code first, then the environment, then the default."""
    if in_code is not None:
        return Resolved(value=in_code, origin="code")
    from_environment = read_setting(setting)
    if from_environment is not None:
        launched = parse_object(read(ORIGINS_VARIABLE) or "{}", ORIGINS_VARIABLE).get(setting)
        origin = f"{program_name()} launch, {launched}" if launched else f"environment variable {variable_of(setting)}"
        return Resolved(value=from_environment, origin=origin)
    return Resolved(value=default, origin="default")
