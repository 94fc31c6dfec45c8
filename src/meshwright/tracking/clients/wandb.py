"""Weights & Biases."""

from __future__ import annotations

from typing import Any, ClassVar

from ..general import on_main_process
from ..projects import ProjectTracker
from ..values import warn_dropped


class WandBTracker(ProjectTracker):
    """Log to a run of the W&B project `run_name`; options are those of `wandb.init`."""

    name = "wandb"
    is_remote = True
    config_options: ClassVar[dict[str, Any]] = {"allow_val_change": True}

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values of one step: numbers, text, dictionaries, lists, and objects of W&B."""
        try:
            self.run.log(values, step=step, **kwargs)
        except TypeError:  # W&B rejects the whole record for one value that it cannot store: log the others
            for name, value in values.items():
                try:
                    self.run.log({name: value}, step=step, commit=False)
                except TypeError:
                    warn_dropped("wandb", name, type(value).__name__)
            self.run.log({}, step=step, **kwargs)

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
