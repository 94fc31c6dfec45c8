"""The base of clients whose `client.init(project=...)` returns a run with a config, `log` and `finish`."""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

from .general import GeneralTracker, on_main_process
from .values import plain


class ProjectTracker(GeneralTracker):
    """Log to a run of the project `run_name`; options are those of the client's `init`. `name` is the package."""

    name: ClassVar[str]
    requires_logging_directory = False
    config_options: ClassVar[dict[str, Any]] = {}

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None
        self.client: Any = None

    @property
    def tracker(self) -> Any:
        """The run of the client."""
        return self.run

    @on_main_process
    def start(self) -> None:
        """Open the run."""
        self.client = import_module(self.name)
        self.run = self.client.init(**{"project": self.run_name, **self.continued, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the config."""
        self.run.config.update(plain(values), **self.config_options)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images; options are those of the run's `log`."""
        images = {name: [self.client.Image(image) for image in batch] for name, batch in values.items()}
        self.run.log(images, step=step, **kwargs)

    def run_identity(self) -> dict[str, Any]:
        """Return the options with which `init` of the client reopens this run."""
        return {"id": self.run.id, "resume": "allow"}

    @on_main_process
    def finish(self) -> None:
        """Write what is left, and close the run."""
        self.run.finish()
