"""The manifests of a job: a TrainJob of Kubeflow Trainer 2 with its runtime, or a JobSet."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ...config import environment
from ...errors import REQUEUE_EXIT_CODE
from .job import ClusterJob

CONTAINER = "node"
"""Also the name of the replicated job: Kubeflow Trainer expects both."""
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_TRAINER = "trainer.kubeflow.org"


def documents(job: ClusterJob, kind: str) -> list[dict[str, Any]]:
    """Return the objects of a job, for `kubectl apply`."""
    if job.image is None:
        raise ValueError("A pod needs an image that holds the script and its packages: give --image.")
    return [_jobset(job)] if kind == "JobSet" else [_runtime(job), _train_job(job)]


def _jobset(job: ClusterJob) -> dict[str, Any]:
    container = {
        "name": CONTAINER,
        "image": job.image,
        "command": _literal(job.command),
        "env": [*_places(job), {"name": "PYTHONUNBUFFERED", "value": "1"}],
        "ports": [{"name": "rendezvous", "containerPort": job.port}],
        **({"resources": _resources(job)} if job.accelerators else {}),
    }
    size = {"parallelism": job.machines, "completions": job.machines, "completionMode": "Indexed"}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": job.name},
            "failurePolicy": {"maxRestarts": job.max_restarts},
            "replicatedJobs": [
                {"name": CONTAINER, "replicas": 1, "template": {"spec": {**size, **_job_spec(job, container)}}}
            ],
        },
    }


def _runtime(job: ClusterJob) -> dict[str, Any]:
    """Return what a TrainJob cannot say itself: how the pods end, what is mounted, and when they start again."""
    container = {"name": CONTAINER, "image": job.image}
    return {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": job.name, "labels": {f"{_TRAINER}/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": job.machines, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": {"maxRestarts": job.max_restarts},
                    "replicatedJobs": [
                        {
                            "name": CONTAINER,
                            "template": {
                                "metadata": {"labels": {f"{_TRAINER}/trainjob-ancestor-step": "trainer"}},
                                "spec": _job_spec(job, container),
                            },
                        }
                    ],
                }
            },
        },
    }


def _train_job(job: ClusterJob) -> dict[str, Any]:
    """Return the TrainJob. Trainer adds the `PET_` variables, the port and the headless service."""
    return {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": {
            "runtimeRef": {"apiGroup": _TRAINER, "kind": "TrainingRuntime", "name": job.name},
            "trainer": {
                "image": job.image,
                "command": _literal(job.command),
                "numNodes": job.machines,
                "numProcPerNode": job.processes_per_machine,
                "env": [{"name": "PYTHONUNBUFFERED", "value": "1"}],
                **({"resourcesPerNode": _resources(job)} if job.accelerators else {}),
            },
        },
    }


def _job_spec(job: ClusterJob, container: dict[str, Any]) -> dict[str, Any]:
    """Return the Job: a pod that saved and left is replaced, another failure ends the Job, and JobSet counts it."""
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    if job.storage is not None:
        mounts.append({"name": "storage", "mountPath": job.storage[1]})
        volumes.append({"name": "storage", "persistentVolumeClaim": {"claimName": job.storage[0]}})
    saved = {"containerName": CONTAINER, "operator": "In", "values": [REQUEUE_EXIT_CODE]}
    return {
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onExitCodes": saved},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": job.seconds_to_end,
                "containers": [container | {"volumeMounts": mounts}],
                "volumes": volumes,
            }
        },
    }


def _places(job: ClusterJob) -> list[dict[str, Any]]:
    """Return the variables by which the pods find each other, as Kubeflow Trainer sets them."""
    names = environment.MACHINES[0]
    return [
        {"name": names.num_machines, "value": str(job.machines)},
        {"name": names.processes_per_machine, "value": str(job.processes_per_machine)},
        {"name": names.machine_rank, "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
        {"name": names.address, "value": f"{job.name}-{CONTAINER}-0-0.{job.name}"},
        {"name": names.port, "value": str(job.port)},
    ]


def _literal(words: Iterable[str]) -> list[str]:
    """Write words so that Kubernetes leaves them as they are: it expands `$(NAME)` and takes `$$` for `$`."""
    return [re.sub(r"\$(?=[$(])", "$$", word) for word in words]


def _resources(job: ClusterJob) -> dict[str, Any]:
    assert job.accelerators is not None
    name, number = job.accelerators
    return {"limits": {name: str(number)}}
