"""Comet."""

from __future__ import annotations

from typing import Any

from ..general import GeneralTracker, on_main_process
from ..values import StepCounter, flat, is_number, warn_dropped


class CometMLTracker(GeneralTracker):
    """Log to an experiment of the Comet project `run_name`; options are those of `comet_ml.start`."""

    name = "comet_ml"
    is_remote = True
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.writer: Any = None
        self._number = StepCounter()

    @property
    def tracker(self) -> Any:
        """The experiment."""
        return self.writer

    @on_main_process
    def start(self) -> None:
        """Open the experiment."""
        import comet_ml

        self._number.next = self.next_step
        self.writer = comet_ml.start(**{"project_name": self.run_name, **self.continued, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the config as parameters, with names flattened as Comet does."""
        self.writer.log_parameters(flat(values, separator="|"))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics, text as text, a dictionary as `name/key`; options are those of `log_metric`."""
        step = self._number(step)
        for name, value in values.items():
            if is_number(value):
                self.writer.log_metric(name, value, step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.log_text(value, step=step, metadata={"name": name})
            elif isinstance(value, dict):
                self.log({f"{name}/{key}": item for key, item in value.items()}, step=step, **kwargs)
            else:
                warn_dropped("comet_ml", name, type(value).__name__)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images; options are those of `log_image`, such as `image_channels="first"`."""
        for name, images in values.items():
            for index, image in enumerate(images):
                self.writer.log_image(image, name=f"{name}_{index}", step=step, **kwargs)

    def run_identity(self) -> dict[str, Any]:
        """Return the options with which `comet_ml.start` reopens this experiment."""
        return {"experiment_key": self.writer.get_key(), "mode": "get"}

    @on_main_process
    def finish(self) -> None:
        """Close the experiment."""
        self.writer.end()
