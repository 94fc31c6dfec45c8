"""TensorBoard: event files in the logging folder."""

from __future__ import annotations

import os
from typing import Any

from ..general import GeneralTracker, on_main_process
from ..values import StepCounter, flat, is_number, plain, warn_dropped


class TensorBoardTracker(GeneralTracker):
    """Write event files to `<logging_dir>/<run_name>`; options are those of `SummaryWriter`."""

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = os.path.join(logging_dir, run_name)
        self.init_kwargs = kwargs
        self.writer: Any = None
        self._number = StepCounter()

    @property
    def tracker(self) -> Any:
        """The `SummaryWriter`."""
        return self.writer

    @on_main_process
    def start(self) -> None:
        """Open the event file."""
        try:
            import torch.utils.tensorboard as package
        except ImportError:
            import tensorboardX as package

        self._number.next = self.next_step
        # Readers then discard the steps after the checkpoint, which the run repeats.
        purge = {"purge_step": self.next_step} if self.continued.get("run") == self.run_name else {}
        self.writer = package.SummaryWriter(self.logging_dir, **{**purge, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the config as hyperparameters, which are numbers and text only, and as a YAML file."""
        import yaml

        known = {name: value if value is not None else "None" for name, value in flat(values).items()}
        self.writer.add_hparams(
            known, metric_dict={}, run_name="."
        )  # by default it creates a second run, named by the time
        with open(os.path.join(self.logging_dir, "hparams.yml"), "w", encoding="utf-8") as file:
            yaml.safe_dump(plain(values), file)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as scalars, text as text, dictionaries of numbers as several curves in one chart."""
        step = self._number(step)
        for name, value in values.items():
            if is_number(value):
                self.writer.add_scalar(name, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                numbers = {key: number for key, number in flat(value, "/").items() if is_number(number)}
                self.writer.add_scalars(name, numbers, global_step=step, **kwargs)
            else:
                warn_dropped(self.name, name, type(value).__name__)
        self.writer.flush()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log batches of images; `dataformats="NHWC"` where channels come last."""
        for name, images in values.items():
            self.writer.add_images(name, images, global_step=step, **kwargs)

    def run_identity(self) -> dict[str, Any]:
        """Return the name of the folder."""
        return {"run": self.run_name}

    @on_main_process
    def finish(self) -> None:
        """Close the event file."""
        self.writer.close()
