"""Pods as network namespaces with names of their own, which run what the manifest of a JobSet says."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.config.launch.settings import LaunchSettings
from meshwright.errors import REQUEUE_EXIT_CODE
from meshwright.tools.clusters.job import ClusterJob, text_of
from meshwright.tools.clusters.kubernetes import documents
from tests.clusters.machines import ACCELERATE, Machine, Running, machines, until, why_not
from tests.timing import limit

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

TRAINING = Path(__file__).with_name("pod_training.py")


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[list[Machine]]:
    """Two pods of the JobSet `train`, under the names that JobSet gives them, and a folder that they share."""
    with machines(["train-node-0-0", "train-node-0-1"], tmp_path, domain="train.default.svc.cluster.local") as made:
        yield made


def container() -> dict[str, Any]:
    """Return the container of the manifest that a launch on two machines prints."""
    flags = {"kubernetes": True, "dry_run": True, "image": "train", "job_name": "train", "cpu": True, "num_machines": 2}
    job = ClusterJob.from_settings(LaunchSettings.resolve(flags, None), (str(TRAINING),))
    (jobset,) = yaml.safe_load_all(text_of(documents(job, "JobSet")))
    (made,) = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    return dict(made)


def start(pods: list[Machine], *, only: Sequence[str]) -> list[Running]:
    """Start the container in every pod, with those of its variables that Kubernetes or the manifest sets."""
    program, *words = container()["command"]
    assert program == "meshwright"
    started = []
    for index, pod in enumerate(pods):
        variables = {item["name"]: item.get("value", str(index)) for item in container()["env"] if item["name"] in only}
        kubernetes = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": str(index)}
        started.append(pod.start(*ACCELERATE, *words, **kubernetes, **variables))
    return started


def wait_at(step: int, started: list[Running], folder: Path) -> None:
    def reached() -> bool:
        ended = any(running.process.poll() is not None for running in started)
        return ended or (folder / f"waiting.{step}").exists()

    until(reached, limit(120))
    assert (folder / f"waiting.{step}").exists(), "\n".join(running.printed for running in started)


def test_two_pods_train_without_flags_and_go_on_after_an_eviction_and_a_kill(
    pods: list[Machine], tmp_path: Path
) -> None:
    all_variables = [item["name"] for item in container()["env"]]
    evicted = start(pods, only=all_variables)
    wait_at(4, evicted, tmp_path)
    evicted[1].process.send_signal(signal.SIGTERM)  # as the kubelet does, to one pod
    assert [running.wait() for running in evicted] == [REQUEUE_EXIT_CODE] * 2, evicted[1].printed
    assert "2 processes begin after step 0" in evicted[0].printed

    (tmp_path / "passed.4").touch()
    killed = start(pods, only=["PET_NNODES"])  # as in a plain indexed Job: the rest is in the names
    wait_at(8, killed, tmp_path)
    pods[1].kill_everything()
    assert killed[0].wait() not in (0, REQUEUE_EXIT_CODE), killed[0].printed
    assert "2 processes begin after step 4" in killed[0].printed

    (tmp_path / "passed.8").touch()
    replaced = start(pods, only=all_variables)
    assert [running.wait() for running in replaced] == [0, 0], replaced[0].printed
    assert "2 processes begin after step 7" in replaced[0].printed
    assert "ended after step 12" in replaced[0].printed
    steps = [int(line) for line in (tmp_path / "steps").read_text().split()]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 10, 11, 12], "only the step without a checkpoint was trained again"
