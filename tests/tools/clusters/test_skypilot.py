"""The task of `meshwright launch --skypilot --dry-run`. docs/skypilot.md says how SkyPilot's own loader was tried."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.config.launch.settings import LaunchSettings
from meshwright.tools.clusters.job import ClusterJob, text_of
from meshwright.tools.clusters.skypilot import task

KEYS = {"name", "num_nodes", "resources", "workdir", "file_mounts", "setup", "run"}
RESOURCES = {"accelerators", "cpus", "use_spot", "image_id", "job_recovery"}


def made(**flags: object) -> dict[str, Any]:
    settings = LaunchSettings.resolve({"skypilot": True, "dry_run": True, **flags}, None)
    found: dict[str, Any] = yaml.safe_load(
        text_of([task(ClusterJob.from_settings(settings, ("train.py", "--name", "a b")))])
    )
    assert found.keys() <= KEYS
    assert found["resources"].keys() <= RESOURCES
    return found


def test_a_task_on_spot_machines_that_is_started_again_when_it_saved_and_left() -> None:
    found = made(
        num_machines=2, accelerators="A100:8", storage="s3://bucket/runs:/checkpoints", max_restarts=3, image="train:7"
    )
    assert (found["name"], found["num_nodes"]) == ("train", 2)
    assert found["resources"] == {
        "use_spot": True,
        "accelerators": "A100:8",
        "image_id": "docker:train:7",
        "job_recovery": {"max_restarts_on_errors": 3, "recover_on_exit_codes": [75]},
    }
    assert found["file_mounts"] == {"/checkpoints": {"source": "s3://bucket/runs", "mode": "MOUNT"}}
    assert found["run"] == "meshwright launch --num_processes 16 train.py --name 'a b'"


def test_machines_without_accelerators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = made(cpu=True, num_machines=2, num_processes=4)
    assert found["resources"]["cpus"] == "2+"
    assert found["run"].startswith("meshwright launch --num_processes 4 --cpu train.py")
    assert "setup" not in found
    (tmp_path / "requirements.txt").touch()
    assert made(cpu=True)["setup"] == "pip install --requirement requirements.txt"


def test_the_accelerators_have_to_be_named() -> None:
    with pytest.raises(ValueError, match="which accelerators to rent: give --accelerators A100:8, or --cpu"):
        made(num_processes=8)
