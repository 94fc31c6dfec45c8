"""datasets, lm-eval, sentence-transformers, denoising-diffusion-pytorch, timm and SwanLab, on our package."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

from tests.sizes import on_two_processes

from .libraries import PYTHON, REPOSITORY, folder, needs_libraries, run_command, run_scenario

pytestmark = [needs_libraries]


def test_the_venv_has_the_pinned_libraries_or_newer_ones_at_night_and_our_package(tmp_path: Path) -> None:
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (REPOSITORY / ".ci/libraries.txt").read_text(), re.MULTILINE))
    code = "import accelerate, json, sys; from importlib.metadata import version; "
    code += "print(json.dumps([accelerate.__file__, {name: version(name) for name in sys.argv[1:]}]))"
    found = run_command(PYTHON, "-c", code, *pins, "accelerate", directory=tmp_path)
    file, versions = json.loads(found.splitlines()[-1])
    assert versions.pop("accelerate") == importlib.metadata.version("accelerate")
    if (Path(PYTHON).parents[1] / "installed").read_text().startswith("--newest"):
        older = {name: found for name, found in versions.items() if Version(found) < Version(pins[name])}
        assert not older, "one library asks for an old release of another"
    else:
        assert versions == pins
    assert Path(file).is_relative_to(REPOSITORY / "src"), "not the one from an index"


@on_two_processes
def test_every_sample_of_a_dataset_comes_once(world_size: int, tmp_path: Path) -> None:
    found = run_scenario("loaders", world_size=world_size, directory=tmp_path)
    everything = list(range(found["num_samples"]))
    for name, samples in found["even"].items():
        assert sorted(samples["given"]) == everything, name
        assert sorted(samples["counted"]) == everything, name
        assert len(set(samples["each"])) == 1, name
        assert len(samples["each"]) == world_size, name
    for name, samples in found["odd"].items():  # a rank may be given more, to keep in step: nothing counts twice
        assert set(samples["given"]) == set(everything[:-5]), name
        assert sorted(samples["counted"]) == everything[:-5], name
    assert found["reads"] == [len(everything) // world_size] * world_size, "nobody reads the files of another rank"


def test_lm_eval_gives_the_same_answers_on_two_processes(tmp_path: Path) -> None:
    alone, both = (
        run_scenario("evaluation_harness", world_size=world_size, directory=_new(tmp_path / str(world_size)))
        for world_size in (1, 2)
    )
    assert both["likelihoods"][0] == both["likelihoods"][1] == pytest.approx(alone["likelihoods"][0], abs=1e-5)
    assert len(set(alone["likelihoods"][0])) > 1
    assert both["asked"] == alone["asked"] == 9
    assert both["accuracy"] == alone["accuracy"]
    assert both["results_on"] == [True, False]


def test_sentence_transformers_encodes_and_refuses_to_train_because_we_are_not_the_other_package(
    tmp_path: Path,
) -> None:
    found = run_scenario("sentences", world_size=1, directory=tmp_path)
    assert found["shape"] == [32]
    # It looks for the word huggingface in the home page that the installed package states. We state no such thing.
    assert "huggingface" not in (found["home_page"] or "")
    assert (found["accelerate_available"], found["training_available"]) == (False, False)
    assert "you need to install the `accelerate`" in found["refusal"]


@on_two_processes
def test_the_trainer_of_denoising_diffusion_pytorch(world_size: int, tmp_path: Path) -> None:
    found = run_scenario("digits_diffusion", world_size=world_size, directory=tmp_path, PYTHONPATH=folder("vision"))
    assert found["moved"] > 1e-4
    assert found["loaded_off_by"] == 0.0
    assert found["steps"] == [6] * world_size
    assert found["ranks_off_by"] == 0.0
    assert found["files"] == ["model-1.pt", "sample-1.png"]


@on_two_processes
def test_a_loop_in_the_style_of_timm(world_size: int, tmp_path: Path) -> None:
    found = run_scenario("image_training", world_size=world_size, directory=tmp_path, PYTHONPATH=folder("vision"))
    assert found["losses"][-1] < found["losses"][0]
    assert found["counted"] == 45, "every image once"
    assert found["ranks_off_by"] == 0.0
    assert found["average_moved"] > 0


@on_two_processes
def test_swanlab_tracks_through_its_own_integration(world_size: int, tmp_path: Path) -> None:
    found = run_scenario("swan", world_size=world_size, directory=tmp_path)
    assert (found["name"], found["is_tracker"], found["processes"]) == ("swanlab", True, world_size)
    (run,) = (tmp_path / "swanlog").glob("run-*")
    config = yaml.safe_load((run / "files" / "config.yaml").read_text())
    assert {name: entry["value"] for name, entry in config.items()} == {
        "FRAMEWORK": "accelerate",
        "batch_size": 4,
        "lr": 0.1,
    }
    (records,) = run.glob("*.swanlab")
    assert records.read_bytes().count(b"five") > 5, "a point per step, and what they are points of"


def _new(directory: Path) -> Path:
    directory.mkdir()
    return directory
