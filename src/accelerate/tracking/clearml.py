"""ClearML."""

from __future__ import annotations

from typing import Any

from .general import GeneralTracker, on_main_process
from .values import StepCounter, is_number, plain, say_left_out


class ClearMLTracker(GeneralTracker):
    """Log to a ClearML task; options are those of `Task.init`.

    A task that runs already is used, and stays open when this run ends.
    """

    name = "clearml"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.task: Any = None
        self._is_ours = False
        self._number = StepCounter()

    @property
    def tracker(self) -> Any:
        """The `clearml.Task`."""
        return self.task

    @on_main_process
    def start(self) -> None:
        """Open a task, unless one is running."""
        from clearml import Task

        self.task = Task.current_task()
        if self.task is None:
            self.task = Task.init(**{"project_name": self.run_name, "task_name": self.run_name, **self.init_kwargs})
            self._is_ours = True

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the config as hyperparameters."""
        self.task.connect(plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as scalars and text to the task's console.

        `train/loss` is the series `loss` of the chart `train`, and a dictionary is a chart with several series.
        """
        step = self._number(step)
        reports = self.task.get_logger()
        for name, value in values.items():
            title, _, series = name.partition("/")
            if is_number(value):
                reports.report_scalar(title, series or title, value, step, **kwargs)
            elif isinstance(value, str):
                reports.report_text(f"{name} (step {step}): {value}", print_console=False)
            elif isinstance(value, dict):
                self.log({f"{name}/{key}": item for key, item in value.items()}, step=step, **kwargs)
            else:
                say_left_out("clearml", name, type(value).__name__)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; options are those of `Logger.report_image`."""
        for name, image in values.items():
            title, _, series = name.partition("/")
            self.task.get_logger().report_image(title, series or title, iteration=step, image=image, **kwargs)

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
        """Log a table: `columns` and rows of `data`, or a data frame."""
        if dataframe is None and data is None:
            raise ValueError("log_table needs rows: give it data=[[...], ...] or dataframe=...")
        table = dataframe if dataframe is not None else [columns, *data] if columns else data  # type: ignore[misc]
        title, _, series = table_name.partition("/")
        self.task.get_logger().report_table(title, series or title, iteration=step, table_plot=table, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Close the task, if it is ours."""
        if self._is_ours:
            self._is_ours = False
            self.task.close()
        else:
            self.task.flush(wait_for_uploads=True)
