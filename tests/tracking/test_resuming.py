"""A run that is killed and resumed is one run in every tracker that can reopen one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright import Accelerator, GeneralTracker, ProjectConfiguration
from meshwright.tools.report.runs.finding import read_runs
from meshwright.tracking import MLflowTracker

from .stores import offline, resumed_script
from .stores.reading import READERS
from .test_adapters import INSTALLED, needs

LATER = [
    (step, (100.0 if step > resumed_script.SAVED_AFTER else 0.0) + step) for step in range(resumed_script.LAST + 1)
]
GOES_ON = [name for name in INSTALLED if name not in ("clearml", "swanlab")]  # those two need their servers


def run_twice(directory: Path, names: list[str]) -> list[dict[str, Any]]:
    """Run the script until it is killed, and again until it ends; return which runs its trackers had each time."""
    for code in (-9, 0):
        ended = subprocess.run(
            [sys.executable, "-m", resumed_script.__name__, *names],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), **offline(directory)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == code, ended.stderr[-4000:]
    starts = [json.loads((directory / f"start-{start}.json").read_text()) for start in range(2)]
    assert starts[1]["resumed"].endswith("checkpoint_0 (step 5)")
    return starts


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("killed")
    return directory, run_twice(directory, ["jsonl", *GOES_ON])


@pytest.mark.parametrize("name", ["jsonl", *(needs(name) for name in GOES_ON)])
def test_the_second_start_goes_on_with_the_run_of_the_checkpoint(
    name: str, killed: tuple[Path, list[dict[str, Any]]]
) -> None:
    first, second = (start["runs"][name] for start in killed[1])
    assert first == second
    assert first


@pytest.mark.parametrize("name", [needs(name) for name in ("aim", "dvclive", "tensorboard")])
def test_there_is_one_run_without_a_gap_and_without_a_doubled_step(
    name: str, killed: tuple[Path, list[dict[str, Any]]]
) -> None:
    assert READERS[name](killed[0]).curves["loss"] == LATER


def test_the_report_shows_one_run_without_a_gap_and_without_a_doubled_step(
    killed: tuple[Path, list[dict[str, Any]]],
) -> None:
    [run] = read_runs([killed[0] / "runs"])
    points = run.scalars["loss"].points()
    assert list(zip(points.step.tolist(), points.value.tolist(), strict=True)) == LATER
    assert len(run.starts) == 2
    assert run.state() == "finished"


@pytest.mark.parametrize("name", [needs("mlflow"), needs("trackio")])
def test_append_only_stores_have_one_run_with_the_later_values_last(
    name: str, killed: tuple[Path, list[dict[str, Any]]]
) -> None:
    loss = dict(READERS[name](killed[0]).curves["loss"])  # finds one run only
    if name == "trackio":  # which sends from a thread of its own: a kill loses what it has not sent
        loss = {step: 0.0 + step for step in range(resumed_script.SAVED_AFTER + 1)} | loss
    assert loss == dict(LATER)


@pytest.mark.parametrize("name", [needs("wandb")])
def test_wandb_has_both_parts_under_one_id(name: str, killed: tuple[Path, list[dict[str, Any]]]) -> None:
    parts = sorted(killed[0].glob("wandb/offline-run-*"))
    assert len(parts) == 2
    assert len({part.name.rpartition("-")[2] for part in parts}) == 1


# --- in one process ---------------------------------------------------------------------------------------------------


def begin(folder: Path, log_with: Any) -> tuple[Accelerator, ProjectConfiguration]:
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
    accelerator = Accelerator(log_with=log_with, project_config=project, cpu=True)
    model = nn.Linear(1, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    return accelerator, project


def save_a_run(folder: Path, **options: Any) -> str:
    """Log three records without steps, save, log a fourth; return the file."""
    accelerator, _ = begin(folder, "jsonl")
    accelerator.init_trackers("project", init_kwargs={"jsonl": {"run": "first"}})
    for value in range(3):
        accelerator.log({"loss": value})
    accelerator.save_state(**options)
    accelerator.log({"loss": 3})
    path: str = accelerator.get_tracker("jsonl", unwrap=True)
    accelerator.end_training()
    return path


@pytest.mark.parametrize("options", [{}, {"wait": False}])
@pytest.mark.parametrize("order", ["before", "after"])
def test_records_without_a_step_go_on_counting(order: str, options: dict[str, Any], tmp_path: Path) -> None:
    path = save_a_run(tmp_path, **options)
    accelerator, _ = begin(tmp_path, "jsonl")
    if order == "before":
        accelerator.init_trackers("project")
    assert accelerator.resume()
    if order == "after":
        accelerator.init_trackers("project")
    assert accelerator.get_tracker("jsonl", unwrap=True) == path
    accelerator.log({"loss": 30})
    accelerator.end_training()
    assert os.listdir(tmp_path / "project") == ["first"], "no second run was left behind"
    [run] = read_runs([tmp_path])
    assert run.scalars["loss"].points().step.tolist() == [0, 1, 2, 3]
    assert run.scalars["loss"].points().value.tolist() == [0, 1, 2, 30]


def test_only_resume_goes_on_with_a_run_and_a_run_that_was_named_stays(tmp_path: Path) -> None:
    path = save_a_run(tmp_path)
    accelerator, _ = begin(tmp_path, "jsonl")
    accelerator.init_trackers("project")
    accelerator.load_state()
    assert accelerator.get_tracker("jsonl", unwrap=True) != path
    accelerator.end_training()
    accelerator, _ = begin(tmp_path, "jsonl")
    accelerator.resume()
    accelerator.init_trackers("project", init_kwargs={"jsonl": {"run": "named"}})
    assert accelerator.get_tracker("jsonl").run == "named"
    accelerator.init_trackers("project", init_kwargs={"jsonl": {"run": "third"}})
    assert accelerator.get_tracker("jsonl").run == "third"
    accelerator.end_training()


def test_a_run_that_got_records_before_the_resume_keeps_them(tmp_path: Path) -> None:
    path = save_a_run(tmp_path)
    accelerator, _ = begin(tmp_path, "jsonl")
    accelerator.init_trackers("project", init_kwargs={})
    other = accelerator.get_tracker("jsonl", unwrap=True)
    accelerator.log({"parameters": 12})
    accelerator.resume()
    assert accelerator.get_tracker("jsonl", unwrap=True) == path
    accelerator.end_training()
    assert "parameters" in Path(other).read_text()


def test_mlflow_deletes_a_run_that_was_opened_before_the_resume_and_got_nothing(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    before = mlflow.get_tracking_uri()
    old, new = (MLflowTracker("shapes", logging_dir=tmp_path) for _ in range(2))
    try:
        old.start()
        old.log({"loss": 1.0})
        old.finish()
        new.start()
        left = new.run_id
        new.discard()
        new.resume_run(old.run_identity(), next_step=1)
        new.start()
        new.log({"loss": 2.0})
        new.finish()
        client = mlflow.MlflowClient()
        assert client.get_run(left).info.lifecycle_stage == "deleted"
        assert [(point.step, point.value) for point in client.get_metric_history(old.run_id, "loss")] == [
            (0, 1),
            (1, 2),
        ]
    finally:
        mlflow.set_tracking_uri(before)


class Refusing(GeneralTracker):
    """Write runs to a list, and refuse to open an old one."""

    name = "refusing"
    requires_logging_directory = False
    tracker = None

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[dict[str, Any]] = []

    def start(self) -> None:
        self.opened.append(dict(self.continued))
        if self.continued:
            raise ConnectionError("no such run")

    def run_identity(self) -> dict[str, Any]:
        return {"place": Path("seven")}


def test_a_tracker_that_cannot_open_its_old_run_begins_a_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator, _ = begin(tmp_path, Refusing())
    accelerator.init_trackers("project")
    accelerator.save_state()
    accelerator.end_training()
    tracker = Refusing()
    accelerator, _ = begin(tmp_path, tracker)
    accelerator.resume()
    accelerator.init_trackers("project")
    assert tracker.opened == [{"place": "seven"}, {}], "what a checkpoint holds is plain data"
    assert "could not continue the run of the checkpoint (ConnectionError: no such run)" in caplog.text
    accelerator.end_training()


class WithoutIdentity(Refusing):
    """Fail to return the identity of its run."""

    def run_identity(self) -> dict[str, Any]:
        raise RuntimeError("unknown")


def test_a_tracker_that_does_not_know_its_run_costs_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator, _ = begin(tmp_path, WithoutIdentity())
    accelerator.init_trackers("project")
    accelerator.save_state()
    assert "does not tell which run it writes (RuntimeError: unknown)" in caplog.text
    assert accelerator.resume()
    accelerator.end_training()
