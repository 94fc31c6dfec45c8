"""The published module `accelerate.tracking`."""

from typing import Any

from meshwright import tracking as _tracking
from meshwright.published import publish as _publish
from meshwright.tracking.general import (
    GeneralTracker as GeneralTracker,
    on_main_process as on_main_process,
)
from meshwright.tracking.registry import (
    filter_trackers as filter_trackers,
    get_available_trackers as get_available_trackers,
    register_tracker_class as register_tracker_class,
)

_publish(__name__)


def __getattr__(name: str) -> Any:
    """Import a tracker when it is used (PEP 562)."""
    return getattr(_tracking, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_tracking)})
