"""Experiment trackers behind `accelerator.log`: the published names. Each adapter is imported on first use."""

from __future__ import annotations

from typing import Any

from .general import GeneralTracker, on_main_process
from .registry import CLASS_OF, class_named, filter_trackers, get_available_trackers, mapping, register_tracker_class

_NAME_OF = {class_name: name for name, class_name in CLASS_OF.items()}

__all__ = [
    "GeneralTracker",
    "filter_trackers",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
    *_NAME_OF,
]


def __getattr__(name: str) -> Any:
    """Import an adapter on first use (PEP 562)."""
    if name == "LOGGER_TYPE_TO_CLASS":
        return mapping()
    if name not in _NAME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return class_named(_NAME_OF[name])


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAME_OF, "LOGGER_TYPE_TO_CLASS"})
