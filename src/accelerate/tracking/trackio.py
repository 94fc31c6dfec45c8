"""Trackio."""

from __future__ import annotations

from typing import Any

from .general import GeneralTracker, on_main_process
from .values import flat, plain


class TrackioTracker(GeneralTracker):
    """Log to a run of the Trackio project `run_name`; options are those of `trackio.init`."""

    name = "trackio"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

    @on_main_process
    def start(self) -> None:
        """Open the run."""
        import trackio

        self.run = trackio.init(**{"project": self.run_name, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the config; Trackio writes it with the first record."""
        self.run.config.update(plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values of one step, a dictionary as `name/key`; what Trackio cannot store it leaves out itself."""
        record: dict[str, Any] = {}
        for name, value in values.items():
            record |= flat({name: value}, separator="/") if isinstance(value, dict) else {name: value}
        self.run.log(record, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Write what is left, and close the run."""
        self.run.finish()
