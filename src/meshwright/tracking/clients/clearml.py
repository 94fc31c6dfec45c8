"""ClearML."""

from __future__ import annotations

from typing import Any

from ..general import GeneralTracker, on_main_process
from ..values import is_number, plain, warn_dropped

_SERIES = ("train", "eval", "test")


class ClearMLTracker(GeneralTracker):
    """Log to a ClearML task; options are those of `Task.init`.

    A task that is running already is used, and stays open when this run ends.
    """

    name = "clearml"
    is_remote = True
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.task: Any = None
        self._owns_task = False

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
            own = {"project_name": self.run_name, "task_name": self.run_name, **self.continued}
            self.task = Task.init(**{**own, **self.init_kwargs})
            self._owns_task = True
            if self.continued:
                self.task.set_initial_iteration(0)  # otherwise ClearML adds its last step to the logged ones

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the config as the task's configuration object."""
        self.task.connect_configuration(plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as scalars and text to the task's console.

        `eval_loss` is the series `eval` of the chart `loss`, `test_loss` its series `test`; other names are of the
        series `train`. Without a step a number is a single value of the task. Dictionaries are flattened.
        """
        reports = self.task.get_logger()
        for name, value in values.items():
            if is_number(value) and step is None:
                reports.report_single_value(name=name, value=value, **kwargs)
            elif is_number(value):
                reports.report_scalar(**_chart_of(name), value=value, iteration=step, **kwargs)
            elif isinstance(value, str):
                at = "" if step is None else f" (step {step})"
                reports.report_text(f"{name}{at}: {value}", print_console=False)
            elif isinstance(value, dict):
                self.log({f"{name}/{key}": item for key, item in value.items()}, step=step, **kwargs)
            else:
                warn_dropped("clearml", name, type(value).__name__)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; options are those of `Logger.report_image`."""
        for name, image in values.items():
            self.task.get_logger().report_image(**_chart_of(name), iteration=step, image=image, **kwargs)

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
        self.task.get_logger().report_table(**_chart_of(table_name), iteration=step, table_plot=table, **kwargs)

    def run_identity(self) -> dict[str, Any]:
        """Return the options with which `Task.init` reopens this task; offline tasks cannot be reopened."""
        return {} if self.task.is_offline() else {"continue_last_task": self.task.id}

    @on_main_process
    def finish(self) -> None:
        """Close the task, if this tracker has opened it."""
        if self._owns_task:
            self._owns_task = False
            self.task.close()
        else:
            self.task.flush(wait_for_uploads=True)


def _chart_of(name: str) -> dict[str, str]:
    series, _, title = name.partition("_")
    return {"title": title, "series": series} if series in _SERIES and title else {"title": name, "series": "train"}
