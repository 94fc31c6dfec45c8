"""Names that a traced process replaces. One that is gone ends the plan, which would be wrong in silence."""

from __future__ import annotations

from typing import Any

import torch

from ....program import program_name

SEEN_IN = ("2.9", "2.13", "2.15")
"""Versions of torch in which all of the names were looked up."""
_NOT_IN_2_9 = ("DeviceMesh._concatenate", "DeviceMesh._get_all_submeshes", "DeviceMesh._unflatten")
"""Names that came between the first two of these, with what they do."""


def replaced(place: Any, name: str) -> Any:
    """Return what is about to be replaced: a function, or the static or class method as it stands in its class.

    Returns:
        None where this version does not have the name yet, and does without it.

    Raises:
        RuntimeError: If the name is gone.
    """
    found = vars(place).get(name, getattr(place, name, None))
    if found is None:
        full = f"{place.__name__}.{name}"
        if not (full in _NOT_IN_2_9 and _version() < (2, 13)):
            raise RuntimeError(
                f"{program_name()} plan replaces {full}, and torch {torch.__version__} has no such name: a plan would "
                f"be wrong. It was made for torch {', '.join(SEEN_IN)}: use one of these."
            )
    return found


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
