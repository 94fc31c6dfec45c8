"""What a launch reads in a pod: recorded environments, and what is missing or contradictory in others."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.config.launch.settings import LaunchSettings
from meshwright.errors import LaunchError
from meshwright.launch.machines.pods import find_pod
from meshwright.launch.plan import LaunchPlan, make_plan

KINDS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("pods.yaml").read_text())
PODS = [pytest.param(pod, id=f"{kind}, {pod['host']}") for kind, entry in KINDS.items() for pod in entry["pods"]]
PREFIXES = (
    "PET_",
    "MASTER_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "NODE_RANK",
    "KUBERNETES",
    "JOB_",
    "LWS_",
    "SKYPILOT",
)


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(PREFIXES):
            monkeypatch.delenv(name)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)


def unknown(*_: object, **__: object) -> list[Any]:
    raise socket.gaierror("not in this test")


def become(monkeypatch: pytest.MonkeyPatch, pod: dict[str, Any]) -> None:
    for name, value in pod["variables"].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "gethostname", lambda: pod["host"])
    monkeypatch.setattr(socket, "getfqdn", lambda name="": pod["full_name"])


def settings_of(**flags: object) -> LaunchSettings:
    return LaunchSettings.resolve({"cpu": True, **flags}, None)


def plan_of(**flags: object) -> LaunchPlan:
    settings = settings_of(**flags)
    return make_plan(settings, ("train.py",), find_pod(settings))


def test_six_kinds_of_jobs_and_more_are_recorded() -> None:
    assert len(KINDS) >= 6


@pytest.mark.parametrize("pod", PODS)
def test_a_pod_needs_no_flags(monkeypatch: pytest.MonkeyPatch, pod: dict[str, Any]) -> None:
    become(monkeypatch, pod)
    machines, rank, address, port, processes = pod["found"]
    plan = plan_of()
    assert (plan.method, plan.num_machines, plan.machine_rank) == ("elastic", machines, rank)
    assert (plan.address, plan.port, plan.processes_here) == (address, port or 29500, processes or 1)
    assert plan.comes_up_late


@pytest.mark.parametrize("kind", [kind for kind, entry in KINDS.items() if len(entry["pods"]) == 2])
def test_two_pods_of_a_job_meet_at_one_address_which_is_not_loopback(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    plans = []
    for pod in KINDS[kind]["pods"]:
        with monkeypatch.context() as patch:
            become(patch, pod)
            plans.append(plan_of())
    assert [plan.machine_rank for plan in plans] == [0, 1]
    assert len({(plan.address, plan.port) for plan in plans}) == 1
    assert not plans[0].address.startswith(("127.", "localhost"))


def test_an_elastic_job_may_begin_with_fewer_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch, KINDS["elastic PyTorchJob"]["pods"][0])
    plan = plan_of()
    assert (plan.min_machines, plan.num_machines, plan.backend) == (1, 3, "c10d")
    assert settings_of().max_restarts == 10


def test_a_job_of_one_pod_starts_the_processes_that_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "1")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "4")
    plan = plan_of()
    assert (plan.num_machines, plan.processes_here, plan.address) == (1, 4, "127.0.0.1")


def test_flags_override_the_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch, KINDS["TrainJob of Kubeflow Trainer 2"]["pods"][1])
    plan = plan_of(num_machines=3, machine_rank=2, main_process_ip="first", main_process_port=4242, num_processes=6)
    assert (plan.num_machines, plan.machine_rank, plan.processes_here) == (3, 2, 2)
    assert (plan.address, plan.port) == ("first", 4242)


def test_a_statefulset_can_be_told_its_size_by_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch, KINDS["StatefulSet"]["pods"][1] | {"variables": {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}})
    assert find_pod(settings_of()) is None, "a shell in a pod of a StatefulSet trains in that pod"
    plan = plan_of(num_machines=2)
    assert (plan.machine_rank, plan.address) == (1, "web-0.nginx.default.svc.cluster.local")
    assert plan.hosts == "web-[0-1]"


def test_a_process_of_another_launch_is_not_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch, KINDS["TrainJob of Kubeflow Trainer 2"]["pods"][0])
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert find_pod(settings_of()) is None


def test_variables_of_processes_outside_of_pods_are_not_those_of_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert find_pod(settings_of()) is None
    assert plan_of(num_processes=2).num_machines == 1


def test_machines_of_skypilot(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for rank in range(2):
        monkeypatch.setenv("SKYPILOT_NUM_NODES", "2")
        monkeypatch.setenv("SKYPILOT_NODE_RANK", str(rank))
        monkeypatch.setenv("SKYPILOT_NODE_IPS", "10.0.0.5\n10.0.0.6")
        monkeypatch.setenv("SKYPILOT_NUM_GPUS_PER_NODE", "1")
        monkeypatch.setenv("SKYPILOT_TASK_ID", "sky-2026-11-18-05-35-44-000000_train_1")
        found.append(find_pod(settings_of()))
    first, second = (cluster for cluster in found if cluster is not None)
    assert (first.num_machines, first.machine_rank, second.machine_rank) == (2, 0, 1)
    assert first.address == second.address == "10.0.0.5"
    assert first.port == second.port not in (None, 29500), "another task on the same machines has another one"
    assert not first.is_pods


JOB = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": "1"}
IN_SERVICE = {"host": "train-1", "full_name": "train-1.train.default.svc.cluster.local"}


@pytest.mark.parametrize(
    ("pod", "complaint"),
    [
        (IN_SERVICE | {"variables": JOB}, "nothing says how many pods train together: set PET_NNODES"),
        (IN_SERVICE | {"variables": JOB | {"PET_NNODES": "two"}}, "PET_NNODES='two' is not a number of machines"),
        (IN_SERVICE | {"variables": JOB | {"PET_NNODES": "4:2"}}, "PET_NNODES='4:2' is not a number of machines"),
        (
            IN_SERVICE | {"variables": JOB | {"PET_NNODES": "2", "JOB_COMPLETION_INDEX": "2"}},
            "is number 2 (JOB_COMPLETION_INDEX), but there are 2, from 0 to 1",
        ),
        (
            {"host": "train-1", "full_name": "train-1", "variables": JOB | {"PET_NNODES": "2"}},
            "does not know the name of the first one: give the pods a headless service",
        ),
        (
            {"host": "node7", "full_name": "node7.dc", "variables": JOB | {"PET_NNODES": "2"}},
            "does not know the name of the first one",
        ),
        (
            {"host": "x", "full_name": "x", "variables": {"PET_NNODES": "2", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}},
            "nothing says which one this is (x): set PET_NODE_RANK",
        ),
        (
            IN_SERVICE | {"variables": JOB | {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1"}},
            "PET_MASTER_ADDR=127.0.0.1 in pod 1 (train-1) is this pod itself, and not the first one",
        ),
        (
            IN_SERVICE | {"variables": {"PET_NNODES": "2", "PET_NODE_RANK": "1", "RANK": "0", "MASTER_ADDR": "a"}},
            "contradict each other: {'PET_NODE_RANK': 1, 'RANK': 0}",
        ),
        (
            {
                "host": "js-workers-1-0",
                "full_name": "js-workers-1-0.js.default.svc.cluster.local",
                "variables": JOB | {"PET_NNODES": "2", "JOB_COMPLETION_INDEX": "0"},
            },
            "is pod 0 of job 1 of a JobSet, and every job counts its pods from 0",
        ),
        (
            IN_SERVICE | {"variables": JOB | {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "many"}},
            "write a number, auto, cpu",
        ),
    ],
)
def test_what_is_missing_or_contradictory_is_said(
    monkeypatch: pytest.MonkeyPatch, pod: dict[str, Any], complaint: str
) -> None:
    become(monkeypatch, pod)
    with pytest.raises(LaunchError) as error:
        find_pod(settings_of())
    assert complaint in str(error.value)


def test_pods_of_a_sweep_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch, {"host": "sweep-1", "full_name": "sweep-1", "variables": JOB})
    assert find_pod(settings_of()) is None, "without a headless service they cannot connect"
    become(monkeypatch, IN_SERVICE | {"variables": JOB})
    assert find_pod(settings_of(num_machines=1)) is None


def test_the_first_pod_of_an_indexed_job_looks_for_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = {"host": "train-0", "full_name": "train-0.train.default.svc.cluster.local"}
    become(monkeypatch, pod | {"variables": JOB | {"JOB_COMPLETION_INDEX": "0"}})
    assert find_pod(settings_of()) is None, "a job of one pod"
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, port: [name] if name.startswith("train-1.train.") else [])
    with pytest.raises(LaunchError, match="This is pod 0"):
        find_pod(settings_of())


def test_a_machine_of_ones_own_is_no_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_pod(settings_of(num_machines=2)) is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "n1")
    assert find_pod(settings_of()) is None, "a shell that is prepared for `srun python`, and has no rank"
