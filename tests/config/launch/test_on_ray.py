"""What `--ray` cannot do is refused before anything starts, and by name."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.config.launch.on_ray import refuse_on_ray, resources_per_process
from meshwright.config.launch.settings import LaunchSettings


def settings(**flags: Any) -> LaunchSettings:
    return LaunchSettings.resolve({"ray": True, **flags}, None)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"survive": True}, "survive (flag --survive) with --ray cannot be used: Ray starts all processes again"),
        ({"memory_copies_every": 5}, "memory_copies_every (flag --memory_copies_every) with --ray"),
        ({"nnodes": "2:3"}, "use --ray_min_processes"),
        ({"log_dir": "logs"}, "Ray shows the output of every rank"),
        ({"machine_rank": 0}, "Ray chooses the nodes and the port"),
        ({"gpu_ids": "0,1"}, "Ray chooses the GPUs"),
        ({"ray_min_processes": 2}, "ray_min_processes is 2 (flag --ray_min_processes): it needs --num_processes"),
        ({"ray_min_processes": 3, "num_processes": 2}, "must be from 1 to that number"),
        ({"ray_resources": "CPU"}, "ray_resources is 'CPU' (flag --ray_resources): write names and numbers"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_has_no_meaning_on_ray_is_refused_by_name(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match="ray") as refused:
        refuse_on_ray(settings(**flags))
    assert sentence in str(refused.value)


def test_what_a_configuration_file_says_of_machines_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    refuse_on_ray(settings(num_processes=4, ray_min_processes=2))


def test_resources_are_names_and_numbers() -> None:
    assert resources_per_process(settings(ray_resources="CPU=4, GPU=0.5")) == {"CPU": 4.0, "GPU": 0.5}
    assert resources_per_process(settings()) is None
