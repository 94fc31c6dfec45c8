"""The manifests of `meshwright launch --kubernetes --dry-run`, against Kubeflow's models of the published schemas."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from meshwright.config.launch.settings import LaunchSettings
from meshwright.tools.clusters.job import ClusterJob, text_of
from meshwright.tools.clusters.kubernetes import documents

GPUS = {"num_machines": 2, "num_processes": 16, "image": "registry.example.org/train:7"}


def manifest(kind: str = "TrainJob", script: tuple[str, ...] = ("train.py", "--lr", "1e-3"), **flags: object) -> Any:
    """Return what the command prints, read again."""
    settings = LaunchSettings.resolve({"kubernetes": True, "dry_run": True, **flags}, None)
    return list(yaml.safe_load_all(text_of(documents(ClusterJob.from_settings(settings, script), kind))))


def job_of(document: dict[str, Any]) -> dict[str, Any]:
    """Return the Job of a JobSet, or of a runtime."""
    spec = document["spec"] if document["kind"] == "JobSet" else document["spec"]["template"]["spec"]
    (job,) = spec["replicatedJobs"]
    return dict(job["template"]["spec"])


@pytest.mark.parametrize(
    "flags",
    [
        GPUS,
        GPUS | {"storage": "checkpoints:/checkpoints", "max_restarts": 3, "main_process_port": 4000},
        {"cpu": True, "num_machines": 2, "image": "train"},
        {"accelerators": "amd.com/gpu:4", "image": "train", "grace_period": 100.5},
    ],
    ids=["GPUs", "everything", "CPUs", "one pod"],
)
@pytest.mark.parametrize("kind", ["TrainJob", "JobSet"])
def test_every_field_is_one_of_the_published_schema(kind: str, flags: dict[str, Any]) -> None:
    pytest.importorskip("kubeflow_trainer_api", reason="pip install kubeflow-trainer-api")
    from kubeflow_trainer_api import models

    classes = {
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
        "JobSet": models.JobsetV1alpha2JobSet,
    }
    for document in manifest(kind, **flags):
        # Reading checks types and required fields, drops unknown fields, and adds defaults.
        assert list(lost(document, classes[document["kind"]].from_dict(document).to_dict())) == []


def lost(written: Any, read: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of what was written and is not there after reading; the models drop empty mappings."""
    if isinstance(written, dict) and (written or read is not None):
        for name, value in written.items():
            yield from lost(value, (read or {}).get(name), f"{path}.{name}")
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        for index, value in enumerate(written):
            yield from lost(value, read[index], f"{path}[{index}]")
    elif written not in (read, {}):
        yield path


def expanded(word: str) -> str:
    """Return a word as Kubernetes hands it on: `$(NAME)` is a variable, and `$$` stands for `$`."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda found: "$" if found[1] is None else f"the value of {found[1]}", word)


@pytest.mark.parametrize("kind", ["TrainJob", "JobSet"])
def test_words_reach_the_pods_as_they_were_given(kind: str) -> None:
    words = ("train.py", "$(SECRET)", "$$(SECRET)", "a$", "$$", "$HOME", "$$$(A)b$(C)", "$(", "cost $5")
    for document in manifest(kind, words, **GPUS):
        if kind == "TrainJob" and document["kind"] == "TrainJob":
            command = document["spec"]["trainer"]["command"]
        elif document["kind"] == "JobSet":
            (container,) = job_of(document)["template"]["spec"]["containers"]
            command = container["command"]
        else:
            continue
        assert tuple(map(expanded, command))[2:] == words
        assert "$$(SECRET)" in command


def test_a_train_job_comes_with_its_runtime() -> None:
    runtime, job = manifest(**GPUS)
    assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] == "train"
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert trainer["command"] == ["meshwright", "launch", "train.py", "--lr", "1e-3"]
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": "8"}}
    assert not any(item["name"].startswith("PET_") for item in trainer["env"]), "Trainer refuses them"


def test_the_pods_of_a_jobset_get_the_variables_of_a_train_job() -> None:
    (document,) = manifest("JobSet", **GPUS)
    spec = job_of(document)
    assert (spec["parallelism"], spec["completions"], spec["completionMode"]) == (2, 2, "Indexed")
    (container,) = spec["template"]["spec"]["containers"]
    variables = {item["name"]: item.get("value", "the index") for item in container["env"]}
    assert variables == {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "8",
        "PET_NODE_RANK": "the index",
        "PET_MASTER_ADDR": "train-node-0-0.train",
        "PET_MASTER_PORT": "29500",
        "PYTHONUNBUFFERED": "1",
    }
    assert document["spec"]["network"]["subdomain"] == "train"
    assert container["ports"] == [{"name": "rendezvous", "containerPort": 29500}]


@pytest.mark.parametrize("kind", ["TrainJob", "JobSet"])
def test_pods_that_saved_and_left_are_replaced_and_other_failures_are_counted(kind: str) -> None:
    document = manifest(kind, **GPUS, max_restarts=3)[0]
    spec = job_of(document)
    first, second = spec["podFailurePolicy"]["rules"]
    assert (first["action"], first["onExitCodes"]["values"]) == ("Ignore", [75])
    assert (second["action"], second["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "a pod failure policy needs it"
    assert spec["backoffLimit"] == 0, "all pods fail with one: it counts once, as a restart of the JobSet"
    failure_policy = (document["spec"] if kind == "JobSet" else document["spec"]["template"]["spec"])["failurePolicy"]
    assert failure_policy == {"maxRestarts": 3}


@pytest.mark.parametrize("kind", ["TrainJob", "JobSet"])
def test_pods_have_time_to_save_shared_memory_and_what_outlives_them(kind: str) -> None:
    pod = job_of(manifest(kind, **GPUS, grace_period=100.5, storage="claim:/checkpoints")[0])["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 131, "more than the launcher gives its processes"
    (container,) = pod["containers"]
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert volumes[mounted["/dev/shm"]] == {"emptyDir": {"medium": "Memory"}}
    assert volumes[mounted["/checkpoints"]] == {"persistentVolumeClaim": {"claimName": "claim"}}


def test_settings_of_the_launch_are_passed_on_and_those_of_this_machine_are_not(monkeypatch: Any) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    flags = GPUS | {"use_fsdp": True, "fsdp_version": "2", "machine_rank": 0, "main_process_ip": "here", "gpu_ids": "0"}
    _, job = manifest(script=("package.tune",), module=True, max_restarts=2, grace_period=60.0, **flags)
    assert job["metadata"]["name"] == "tune"
    words = "--mixed_precision bf16 --grace_period 60.0 --module --use_fsdp --fsdp_version 2 package.tune"
    assert job["spec"]["trainer"]["command"] == ["meshwright", "launch", *words.split()]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"num_processes": 2}, "A pod needs an image"),
        ({"image": "train"}, "give --num_processes (of all machines together), --accelerators"),
        (GPUS | {"num_processes": 3}, "use a multiple of 2"),
        (GPUS | {"accelerators": "nvidia.com/gpu:4"}, "8 processes per machine need 8 accelerators"),
        (GPUS | {"accelerators": "nvidia.com/gpu:4", "cpu": True}, "contradict each other"),
        (GPUS | {"accelerators": "nvidia.com/gpu:all"}, "cannot be read: write nvidia.com/gpu:8"),
        (GPUS | {"storage": "/checkpoints"}, "write claim:/checkpoints"),
        (GPUS | {"job_name": "My Job"}, "'My Job' of the job has to begin with a letter"),
        (GPUS | {"nnodes": "1:2"}, "nnodes = 1:2 (flag --nnodes) cannot be used with --kubernetes"),
        (GPUS | {"dry_run": False}, "--kubernetes submits nothing: add --dry_run"),
        (GPUS | {"skypilot": True}, "give --kubernetes or --skypilot"),
    ],
)
def test_what_cannot_be_a_job_is_refused(flags: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        manifest(**flags)
