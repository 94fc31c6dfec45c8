"""Weights & Biases."""

from __future__ import annotations

from typing import Any

from .general import GeneralTracker, on_main_process
from .values import plain, say_left_out


class WandBTracker(GeneralTracker):
    """Log to a run of the W&B project `run_name`; options are those of `wandb.init`."""

    name = "wandb"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    @property
    def tracker(self) -> Any:
        """The `wandb.Run`."""
        return self.run

    @on_main_process
    def start(self) -> None:
        """Open the run."""
        import wandb

        self.run = wandb.init(**{"project": self.run_name, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the config."""
        self.run.config.update(plain(values), allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values of one step; W&B takes numbers, text, dictionaries, lists, and objects of its own."""
        try:
            self.run.log(values, step=step, **kwargs)
        except TypeError:  # one value that W&B cannot store costs the whole record: store the others
            for name, value in values.items():
                try:
                    self.run.log({name: value}, step=step, commit=False)
                except TypeError:
                    say_left_out("wandb", name, type(value).__name__)
            self.run.log({}, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images; options are those of `wandb.Run.log`."""
        import wandb

        images = {name: [wandb.Image(image) for image in batch] for name, batch in values.items()}
        self.run.log(images, step=step, **kwargs)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table: `columns` and rows of `data`, or a data frame; cells may be images and the like."""
        import wandb

        self.run.log({table_name: wandb.Table(columns=columns, data=data, dataframe=dataframe)}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Close the run."""
        self.run.finish()
