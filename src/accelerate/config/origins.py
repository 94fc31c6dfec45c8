"""Where a value came from: a small module, so that the command can ask without loading the settings of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NOT_YET = "this version of the library does not have it yet."
ORIGINS_VARIABLE = "ACCELERATE_LAUNCH_ORIGINS"
"""Carries into the processes where `accelerate launch` took each setting from: option -> origin, as JSON."""


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A value and where it came from."""

    value: Any
    origin: str
