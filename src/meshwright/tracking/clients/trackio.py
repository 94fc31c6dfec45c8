"""Trackio."""

from __future__ import annotations

from typing import Any

from ..general import on_main_process
from ..projects import ProjectTracker
from ..values import flat


class TrackioTracker(ProjectTracker):
    """Log to a run of the Trackio project `run_name`; options are those of `trackio.init`."""

    name = "trackio"
    is_remote = True

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values of one step, a dictionary as `name/key`; Trackio drops values that it cannot store."""
        record: dict[str, Any] = {}
        for name, value in values.items():
            record |= flat({name: value}, separator="/") if isinstance(value, dict) else {name: value}
        self.run.log(record, step=step, **kwargs)

    def run_identity(self) -> dict[str, Any]:
        """Return the options with which `trackio.init` reopens this run."""
        return {"name": self.run.name, "resume": "allow"}
