"""MLflow."""

from __future__ import annotations

import logging
import os
import posixpath
import re
from functools import cache
from pathlib import Path
from typing import Any

from ...config.environment import parse_flag_from_env, read
from ...untrusted import parse_json
from ..general import GeneralTracker, on_main_process
from ..values import StepCounter, flat, is_number

logger = logging.getLogger(__name__)

_SHORTENED = "... (shortened)"


class MLflowTracker(GeneralTracker):
    """Log to a run of an MLflow experiment.

    `logging_dir` is a tracking URI, or a folder, where a database and the artifacts are kept; without it MLflow's own
    settings decide. The variables `MLFLOW_EXPERIMENT_NAME`, `MLFLOW_RUN_ID`, `MLFLOW_TAGS` (a JSON object) and
    `MLFLOW_NESTED_RUN` override the arguments, as published.
    """

    name = "mlflow"
    requires_logging_directory = False

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__()
        self.experiment_name = experiment_name
        self.logging_dir = logging_dir
        self.run_id = read("MLFLOW_RUN_ID") or run_id
        self._new_run_id: str | None = None
        """The run that `start` has created; a given run is never replaced by that of a checkpoint."""
        self.options = {
            "tags": parse_json(read("MLFLOW_TAGS") or "null", "MLFLOW_TAGS") or tags,
            "nested": parse_flag_from_env("MLFLOW_NESTED_RUN", nested_run),
            "run_name": run_name,
            "description": description,
        }
        self.active_run: Any = None
        self._client: Any = None
        self._number = StepCounter()

    @property
    def tracker(self) -> Any:
        """The `mlflow.ActiveRun`."""
        return self.active_run

    @on_main_process
    def start(self) -> None:
        """Open a new run, or reopen an existing one."""
        import mlflow
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME

        experiment = MLFLOW_EXPERIMENT_NAME.get() or self.experiment_name
        folder = None if self.logging_dir is None else os.fspath(self.logging_dir)
        if folder is not None and (folder == "databricks" or ":" in folder):
            mlflow.set_tracking_uri(folder)
        elif folder is not None:
            _store_in_folder(Path(folder).absolute(), experiment)
        if experiment is not None:
            mlflow.set_experiment(experiment)
        self.is_remote = not mlflow.get_tracking_uri().startswith(("sqlite:", "file:", "/", "."))
        self._number.next = self.next_step
        if self.run_id == self._new_run_id:
            self.run_id = self.continued.get("run_id", self.run_id)
        self.active_run = mlflow.start_run(run_id=self.run_id, **self.options)
        if self.run_id is None:
            self.run_id = self._new_run_id = self.active_run.info.run_id
        # The active run belongs to the thread that opened it, and `log` has another thread: the run id is passed to
        # the client in each call.
        self._client = mlflow.MlflowClient()

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the config as parameters, within MLflow's limits; parameters of an existing run cannot be changed."""
        from mlflow.entities import Param
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH

        given = {_sanitized(name): str(value) for name, value in flat(values).items()}
        for name, value in given.items():
            if len(value) > MAX_PARAM_VAL_LENGTH:
                given[name] = value[: MAX_PARAM_VAL_LENGTH - len(_SHORTENED)] + _SHORTENED
                _warn("MLflow keeps %d characters of a parameter: %s is shortened.", MAX_PARAM_VAL_LENGTH, name)
        stored = self._client.get_run(self.run_id).data.params
        for name in given.keys() & stored.keys():
            if given[name] != stored[name]:
                _warn("MLflow does not change parameters of a run: %s stays %s.", name, stored[name])
        new = [Param(name, value) for name, value in given.items() if name not in stored]
        for first in range(0, len(new), MAX_PARAMS_TAGS_PER_BATCH):
            self._client.log_batch(self.run_id, params=new[first : first + MAX_PARAMS_TAGS_PER_BATCH])

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics, text as tags (the last value is kept), a dictionary as `name/key`."""
        import mlflow

        step = self._number(step)
        metrics: dict[str, float] = {}
        for name, value in values.items():
            if is_number(value):
                metrics[_sanitized(name)] = value
            elif isinstance(value, str):
                self._client.set_tag(self.run_id, _sanitized(name), value)
            elif isinstance(value, dict):
                self.log({f"{name}/{key}": item for key, item in value.items()}, step=step, **kwargs)
            else:
                _warn("MLflow has no place for %r, a %s: it is left out.", name, type(value).__name__)
        if metrics:
            mlflow.log_metrics(metrics, step=step, run_id=self.run_id, **kwargs)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Store a figure of matplotlib or plotly."""
        self._client.log_figure(self.run_id, figure, artifact_file, save_kwargs=save_kwargs)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Store the files of a folder."""
        self._client.log_artifacts(self.run_id, local_dir, artifact_path)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Store a file."""
        self._client.log_artifact(self.run_id, local_path, artifact_path)

    def run_identity(self) -> dict[str, Any]:
        """Return the id of the run."""
        return {"run_id": self.run_id}

    @on_main_process
    def discard(self) -> None:
        """Close the run, and delete it unless it existed before."""
        self.finish()
        if self.run_id == self._new_run_id:
            self._client.delete_run(self.run_id)

    @on_main_process
    def finish(self) -> None:
        """Close the run."""
        import mlflow

        running = mlflow.active_run()
        if running is not None and running.info.run_id == self.run_id:
            mlflow.end_run()


def _store_in_folder(folder: Path, experiment: str | None) -> None:
    """Store all data in a folder: MLflow 3 needs a database, and by default puts artifacts elsewhere."""
    import mlflow

    folder.mkdir(parents=True, exist_ok=True)
    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    if experiment is not None and mlflow.get_experiment_by_name(experiment) is None:
        mlflow.create_experiment(experiment, artifact_location=(folder / "artifacts").as_uri())


def _sanitized(name: str) -> str:
    """Replace characters that MLflow does not allow in names, for which it would reject the whole record."""
    return posixpath.normpath(re.sub(r"[^\w\-. :/]", "_", name)).lstrip("./")[:250] or "_"


@cache
def _warn(message: str, *arguments: Any) -> None:
    logger.warning(message, *arguments)
