"""SwanLab."""

from __future__ import annotations

from typing import Any

from ..general import on_main_process
from ..projects import ProjectTracker
from ..values import is_number, warn_dropped


class SwanLabTracker(ProjectTracker):
    """Log to a run of the SwanLab project `run_name`; options are those of `swanlab.init`."""

    name = "swanlab"
    is_remote = True

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, text and SwanLab's own objects, a dictionary as `name/key`."""
        record = _supported(values)
        if record:
            self.run.log(record, step=step, **kwargs)

    def run_identity(self) -> dict[str, Any]:
        """Return the options with which `swanlab.init` reopens this run; only SwanLab's cloud supports it."""
        public = getattr(self.run, "public", None)
        is_in_cloud = bool(getattr(getattr(public, "cloud", None), "available", False))
        return {"id": public.run_id, "resume": "allow"} if is_in_cloud and public is not None else {}


def _supported(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that SwanLab can store, converted to its types."""
    import swanlab

    record: dict[str, Any] = {}
    for name, value in values.items():
        parts = value if isinstance(value, list) and value else [value]
        if is_number(value):
            record[name] = value
        elif isinstance(value, str):
            record[name] = swanlab.Text(value)
        elif isinstance(value, dict):
            record |= _supported({f"{name}/{key}": item for key, item in value.items()})
        elif all(type(part).__module__.startswith(("swanlab.", "pyecharts.")) for part in parts):
            record[name] = value
        else:
            warn_dropped("swanlab", name, type(value).__name__)
    return record
