"""SwanLab."""

from __future__ import annotations

from typing import Any

from .general import GeneralTracker, on_main_process
from .values import is_number, plain, say_left_out


class SwanLabTracker(GeneralTracker):
    """Log to a run of the SwanLab project `run_name`; options are those of `swanlab.init`."""

    name = "swanlab"
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
        import swanlab

        self.run = swanlab.init(**{"project": self.run_name, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the config."""
        self.run.config.update(plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, text and SwanLab's own objects, a dictionary as `name/key`."""
        record = _taken(values)
        if record:
            self.run.log(record, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images."""
        import swanlab

        images = {name: [swanlab.Image(image) for image in batch] for name, batch in values.items()}
        self.run.log(images, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Close the run."""
        self.run.finish()


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
