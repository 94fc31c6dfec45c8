"""SwanLab."""

from __future__ import annotations

from typing import Any

from ..general import on_main_process
from ..projects import ProjectTracker
from ..values import is_number, say_left_out


class SwanLabTracker(ProjectTracker):
    """Log to a run of the SwanLab project `run_name`; options are those of `swanlab.init`."""

    name = "swanlab"
    is_remote = True

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, text and SwanLab's own objects, a dictionary as `name/key`."""
        record = _taken(values)
        if record:
            self.run.log(record, step=step, **kwargs)

    def run_identity(self) -> dict[str, Any]:
        """Return the options by which `swanlab.init` opens this run again; only SwanLab's cloud can."""
        public = getattr(self.run, "public", None)
        is_in_cloud = bool(getattr(getattr(public, "cloud", None), "available", False))
        return {"id": public.run_id, "resume": "allow"} if is_in_cloud and public is not None else {}


def _taken(values: dict[str, Any]) -> dict[str, Any]:
    """Return what SwanLab can store, as it wants it."""
    import swanlab

    record: dict[str, Any] = {}
    for name, value in values.items():
        parts = value if isinstance(value, list) and value else [value]
        if is_number(value):
            record[name] = value
        elif isinstance(value, str):
            record[name] = swanlab.Text(value)
        elif isinstance(value, dict):
            record |= _taken({f"{name}/{key}": item for key, item in value.items()})
        elif all(type(part).__module__.startswith(("swanlab.", "pyecharts.")) for part in parts):
            record[name] = value
        else:
            say_left_out("swanlab", name, type(value).__name__)
    return record
