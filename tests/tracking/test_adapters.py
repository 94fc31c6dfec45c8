"""Every tracker stores what was logged: real packages, offline, two processes, read back from their files."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.tracking import ClearMLTracker, MLflowTracker
from tests.launching import run_accelerate
from tests.sizes import at_night
from tests.warm import COLD

from .stores import PACKAGES, odd_script, offline, script
from .stores.reading import READERS

INSTALLED = [name for name in PACKAGES if importlib.util.find_spec(name) is not None]


def needs(name: str) -> Any:
    """Return a parameter that is skipped, by its name, where the package is not installed."""
    return pytest.param(name, marks=pytest.mark.skipif(name not in INSTALLED, reason=f"pip install {name}"))


each_tracker = pytest.mark.parametrize("name", [needs(name) for name in PACKAGES])

# --- a run of two processes -------------------------------------------------------------------------------------------

NESTED = {
    "lr": 0.5,
    "layers": [1, 2, 3],
    "color": "red",
    "model": {"depth": 3, "path": "weights/best.pt"},
    "scale": 0.25,
    "nothing": None,
    "deep": {"er": {"est": True}},
}
ONE_LEVEL = {
    "lr": 0.5,
    "layers": "[1, 2, 3]",
    "color": "red",
    "model.depth": 3,
    "model.path": "weights/best.pt",
    "scale": 0.25,
    "nothing": None,
    "deep.er.est": True,
}
EXPECTED_CONFIG: dict[str, dict[str, Any]] = {
    "comet_ml": {name.replace(".", "|"): value for name, value in ONE_LEVEL.items()},
    "mlflow": {name: str(value) for name, value in ONE_LEVEL.items()},
}
EXPECTED_IMAGES = {"aim": 1, "clearml": 1, "comet_ml": 2, "swanlab": 2, "tensorboard": 1, "wandb": 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Log to all installed trackers at once, on two processes; return where they stored it."""
    directory = tmp_path_factory.mktemp("trackers")
    launched = run_accelerate(
        *("launch", "--cpu", "--num_processes", 2, script.__file__, *INSTALLED),
        directory=directory,
        time_limit=560,
        **offline(directory),
        **{COLD: "1"},  # clients fork, and look at how the interpreter was started and ends
    )
    assert launched.code == 0, launched.complaints[-4000:]
    return directory


@each_tracker
def test_a_run_of_two_processes_is_stored_once_in_order_and_with_its_steps(name: str, run: Path) -> None:
    stored = READERS[name](run)
    assert stored.curves["loss"] == [(step, script.loss_at(step)) for step in script.STEPS]
    assert stored.curves["train/rank"] == [(step, 0) for step in script.STEPS]
    assert stored.texts["note"] == [(None if name == "mlflow" else 10, "it begins")]
    assert stored.config == EXPECTED_CONFIG.get(name, NESTED)
    assert stored.images == EXPECTED_IMAGES.get(name, 0)
    assert stored.tables == (name in ("wandb", "clearml"))
    if name != "mlflow":  # its run object only tells about the run
        assert stored.curves["direct"] == [(300, 7)]


CLIENTS = {
    "aim": "Run",
    "clearml": "Task",
    "comet_ml": "OfflineExperiment",
    "dvclive": "Live",
    "mlflow": "ActiveRun",
    "swanlab": "SwanLabRun",
    "tensorboard": "SummaryWriter",
    "trackio": "Run",
    "wandb": "Run",
}


def test_the_client_itself_is_for_the_main_process_and_the_others_get_one_that_does_nothing(run: Path) -> None:
    assert json.loads((run / "clients-0.json").read_text()) == {name: CLIENTS[name] for name in INSTALLED}
    assert json.loads((run / "clients-1.json").read_text()) == dict.fromkeys(INSTALLED, "BlankTracker")


# --- what users log by mistake or by habit ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def odd_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Log odd values without steps to all installed trackers; return where they are stored, and what was warned of.

    The script finishes every tracker a second time, and ends with an error if one minds.
    """
    directory = tmp_path_factory.mktemp("odd")
    launched = run_accelerate(
        *("launch", "--cpu", "--num_processes", 1, odd_script.__file__, *INSTALLED),
        directory=directory,
        time_limit=560,
        PYTHONPATH=str(Path(__file__).parents[2]),
        **offline(directory),
    )
    assert launched.code == 0, launched.complaints[-4000:]
    return directory, json.loads((directory / "warnings.json").read_text())


@each_tracker
def test_no_odd_value_costs_the_others_of_its_record_and_records_without_a_step_are_counted(
    name: str, odd_run: tuple[Path, list[str]]
) -> None:
    stored = READERS[name](odd_run[0])
    assert stored.curves["ok"] == [(step, step) for step in range(len(odd_script.RECORDS))]


@each_tracker
def test_numbers_that_are_none_are_stored_as_far_as_the_tracker_can(name: str, odd_run: tuple[Path, list[str]]) -> None:
    stored = READERS[name](odd_run[0])
    points = {**stored.curves, **stored.texts}
    (step, value), *more = points["nan"]
    assert (step, more) == (0, [])
    assert str(value).lower() == "nan" or name == "clearml"  # ClearML writes 0 and says so
    assert len(points["inf"]) == 1


@pytest.mark.parametrize("name", [needs(name) for name in PACKAGES if name != "tensorboard"])
def test_a_dictionary_becomes_several_curves(name: str, odd_run: tuple[Path, list[str]]) -> None:
    stored = READERS[name](odd_run[0])
    assert [value for _, value in stored.curves["chart/a"]] == [1]
    assert [value for _, value in stored.curves["chart/b"]] == [2.5]


@each_tracker
def test_what_a_tracker_cannot_take_is_left_out_with_one_warning_for_its_name(
    name: str, odd_run: tuple[Path, list[str]]
) -> None:
    directory, messages = odd_run
    stored = READERS[name](directory)
    client = "MLflow" if name == "mlflow" else f"The tracker '{name}'"
    warned = [line for line in messages if line.startswith(client) and "'thing'" in line]
    assert "thing" not in stored.curves
    assert "thing" not in stored.texts
    assert len(warned) == (name != "trackio")  # which warns by itself


@pytest.mark.parametrize("name", [needs("mlflow")])
def test_long_and_many_parameters_fit_into_mlflow(name: str, odd_run: tuple[Path, list[str]]) -> None:
    directory, messages = odd_run
    config = READERS[name](directory).config
    assert len(config) == len(odd_script.CONFIG) > 250
    assert len(config["long"]) == 6000
    assert config["long"].endswith("x... (shortened)")
    assert sum("shortened" in line for line in messages) == 1


def test_a_run_of_mlflow_can_be_opened_again_with_another_config_and_takes_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri_before = mlflow.get_tracking_uri()
    (tmp_path / "notes.txt").write_text("a file")
    first = MLflowTracker("shapes", logging_dir=tmp_path / "mlflow", tags={"team": "blue"})
    again = MLflowTracker("shapes", logging_dir=tmp_path / "mlflow")
    try:
        first.start()
        first.store_init_configuration({"lr": 1, "depth": 2})
        first.log({"loss": 1.0}, step=5)
        first.log_artifact(str(tmp_path / "notes.txt"), "texts")
        first.finish()
        again.run_id = first.run_id
        again.start()
        again.store_init_configuration({"lr": 3, "width": 4})
        again.log({"loss": 0.5}, step=6)
        again.finish()
    finally:
        mlflow.set_tracking_uri(uri_before)
    stored = READERS["mlflow"](tmp_path)
    assert stored.config == {"lr": "1", "depth": "2", "width": "4"}
    assert "lr stays 1" in caplog.text
    assert stored.curves["loss"] == [(5, 1.0), (6, 0.5)]
    assert stored.texts["team"] == [(None, "blue")]
    assert [path.read_text() for path in tmp_path.glob("mlflow/artifacts/*/artifacts/texts/notes.txt")] == ["a file"]


@pytest.mark.parametrize("name", [needs("clearml")])
def test_a_task_of_clearml_that_was_open_before_is_used_and_stays_open(
    name: str, odd_run: tuple[Path, list[str]]
) -> None:
    stored = READERS[name](odd_run[0])  # one task, or the reader fails
    assert stored.curves["after"] == [(1, 1)]  # logged by the script after end_training()
    assert stored.config["function"] == "max"


class Recorder:
    """Take any call and write it down."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def get_logger(self) -> Recorder:
        return self

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append((name, kwargs))


def test_charts_of_clearml_are_named_as_published() -> None:
    tracker = ClearMLTracker("shapes")
    tracker.task = client = Recorder()
    tracker.log({"loss": 1.0, "eval_loss": 2.0, "test_acc": 3.0, "train/loss": 4.0, "eval": 5.0}, step=7)
    tracker.log({"eval_loss": 6.0})
    assert client.calls == [
        ("report_scalar", {"title": "loss", "series": "train", "value": 1.0, "iteration": 7}),
        ("report_scalar", {"title": "loss", "series": "eval", "value": 2.0, "iteration": 7}),
        ("report_scalar", {"title": "acc", "series": "test", "value": 3.0, "iteration": 7}),
        ("report_scalar", {"title": "train/loss", "series": "train", "value": 4.0, "iteration": 7}),
        ("report_scalar", {"title": "eval", "series": "train", "value": 5.0, "iteration": 7}),
        ("report_single_value", {"name": "eval_loss", "value": 6.0}),
    ]


def test_variables_of_mlflow_go_before_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"run_id": "mine", "tags": {"team": "red"}, "nested_run": False}
    tracker = MLflowTracker("shapes", **given)  # type: ignore[arg-type]
    assert (tracker.run_id, tracker.options["tags"], tracker.options["nested"]) == ("mine", {"team": "red"}, False)
    monkeypatch.setenv("MLFLOW_RUN_ID", "theirs")
    monkeypatch.setenv("MLFLOW_TAGS", '{"team": "blue"}')
    monkeypatch.setenv("MLFLOW_NESTED_RUN", "true")
    tracker = MLflowTracker("shapes", **given)  # type: ignore[arg-type]
    assert (tracker.run_id, tracker.options["tags"], tracker.options["nested"]) == ("theirs", {"team": "blue"}, True)
    monkeypatch.setenv("MLFLOW_NESTED_RUN", "0")
    assert MLflowTracker("shapes", nested_run=True).options["nested"] is False


# --- a tracker that a client brings itself ----------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [at_night(1), at_night(2)])
@pytest.mark.parametrize("name", [needs("swanlab")])
def test_swanlabs_own_tracker_gets_every_loss_of_a_digits_classifier(name: str, processes: int, tmp_path: Path) -> None:
    program = Path(script.__file__).with_name("digits_script.py")
    launched = run_accelerate(
        *("launch", "--cpu", "--num_processes", processes, program), directory=tmp_path, **offline(tmp_path)
    )
    assert launched.code == 0, launched.complaints[-4000:]
    printed = [float(loss) for loss in re.findall(r"^loss ([\d.e-]+)$", launched.printed, re.MULTILINE)]
    stored = READERS[name](tmp_path)
    assert len(printed) == 5 * 600 // (50 * processes)
    assert [step for step, _ in stored.curves["training_loss"]] == list(range(len(printed)))
    assert [value for _, value in stored.curves["training_loss"]] == pytest.approx(printed)
    assert printed[-1] < 0.5 * printed[0]
    assert (stored.config["epochs"], stored.config["lr"]) == (5, 0.1)
