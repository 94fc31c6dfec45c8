from __future__ import annotations

import logging
import sys
from typing import Any

import pytest

import meshwright.tracking
from meshwright import Accelerator, GeneralTracker, LoggerType
from meshwright.tracking import filter_trackers, get_available_trackers, register_tracker_class, registry


class Mine(GeneralTracker):
    name = "mine"
    requires_logging_directory = False
    tracker = None


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the clients from the import system: an import of one fails as if it were not installed."""
    for name in ("wandb", "aim", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)


def test_a_name_several_names_and_objects_can_be_mixed() -> None:
    mine = Mine()
    assert filter_trackers(None) == []
    assert filter_trackers("jsonl") == ["jsonl"]
    assert filter_trackers(LoggerType.JSONL) == ["jsonl"]
    assert filter_trackers(mine) == [mine]
    assert filter_trackers(["jsonl", mine, "jsonl"]) == ["jsonl", mine]


def test_a_misspelled_name_is_an_error_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match=r"capability: wanbd. Did you mean 'wandb'\?"):
        Accelerator(log_with="wanbd")


def test_what_is_no_tracker_is_refused() -> None:
    with pytest.raises(TypeError, match="not 3"):
        filter_trackers(["jsonl", 3])
    with pytest.raises(ValueError, match="subclass"):
        register_tracker_class(int)  # type: ignore[arg-type]


def test_an_object_that_is_not_whole_is_refused_though_its_constructor_did_not_ask() -> None:
    class Careless(GeneralTracker):
        def __init__(self) -> None:
            pass

    with pytest.raises(NotImplementedError, match="Careless"):
        Accelerator(log_with=Careless())


@pytest.mark.usefixtures("without_packages")
def test_a_tracker_that_is_not_installed_is_left_out_with_the_command_that_installs_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert filter_trackers(["jsonl", "wandb"]) == ["jsonl"]
    assert "pip install wandb" in caplog.text


@pytest.mark.usefixtures("without_packages")
def test_all_takes_what_is_there_and_says_which(caplog: pytest.LogCaptureFixture) -> None:
    mine = Mine()
    chosen = filter_trackers(["all", mine], logging_dir=None)
    assert mine in chosen
    assert "jsonl" not in chosen, "only where it is named"
    assert not {"wandb", "aim", "mlflow", "tensorboard"} & {item for item in chosen if isinstance(item, str)}
    [message] = [record.getMessage() for record in caplog.records]
    assert "logs to: " in message
    assert "wandb (not installed)" in message
    assert LoggerType.WANDB not in get_available_trackers()
    assert filter_trackers(["all", "jsonl"]).count("jsonl") == 1


def test_a_tracker_that_needs_a_folder_says_how_to_give_one() -> None:
    pytest.importorskip("tensorboard")
    with pytest.raises(ValueError, match="project_dir"):
        Accelerator(log_with="tensorboard")


def test_a_class_of_ones_own_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_mapping", None)
    before = meshwright.tracking.LOGGER_TYPE_TO_CLASS
    register_tracker_class(Mine)
    assert filter_trackers("mine") == ["mine"]
    assert before["mine"] is meshwright.tracking.LOGGER_TYPE_TO_CLASS["mine"] is Mine
    with pytest.raises(ValueError, match="needs a name"):
        register_tracker_class(type("Nameless", (GeneralTracker,), {"requires_logging_directory": False}))
    with pytest.raises(ValueError, match="requires_logging_directory = False"):
        register_tracker_class(type("Undecided", (GeneralTracker,), {"name": "undecided"}))
    assert "undecided" not in registry._registered


@pytest.mark.parametrize("name", ["mine", "wandb"])
def test_a_class_that_takes_the_place_of_another_is_warned_of(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(registry, "_registered", {"mine": Mine})
    monkeypatch.setattr(registry, "_mapping", None)
    other = type("Other", (Mine,), {"name": name})
    with pytest.warns(UserWarning, match=f"{name}.*Other"):
        register_tracker_class(other)
    assert meshwright.tracking.LOGGER_TYPE_TO_CLASS[name] is other


def test_every_published_name_is_there() -> None:
    for name in meshwright.tracking.__all__:
        assert getattr(meshwright.tracking, name) is not None
    assert "WandBTracker" in dir(meshwright.tracking)
    with pytest.raises(AttributeError):
        _: Any = meshwright.tracking.NoSuchTracker


def test_looking_at_every_adapter_imports_no_client() -> None:
    import subprocess

    program = (
        "import sys, meshwright.tracking as t\n"
        "[getattr(t, name) for name in t.__all__]\n"
        "clients = {'aim', 'clearml', 'comet_ml', 'dvclive', 'mlflow', 'swanlab', 'tensorboard', 'trackio', 'wandb'}\n"
        "print(sorted(clients & set(sys.modules)))\n"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"


def test_messages_reach_the_user_by_default() -> None:
    assert logging.getLogger("meshwright.tracking.registry").getEffectiveLevel() <= logging.WARNING
