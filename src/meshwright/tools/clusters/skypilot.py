"""The task of a job for `sky jobs launch`, on spot machines."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from ...errors import REQUEUE_EXIT_CODE
from .job import ClusterJob

REQUIREMENTS = "requirements.txt"


def task(job: ClusterJob) -> dict[str, Any]:
    """Return the task. SkyPilot starts it again after a preemption and after exit code 75; the script resumes."""
    resources: dict[str, Any] = {"use_spot": True}
    if job.accelerators is not None:
        resources["accelerators"] = f"{job.accelerators[0]}:{job.accelerators[1]}"
    else:
        resources["cpus"] = f"{job.processes_per_machine}+"
    if job.image is not None:
        resources["image_id"] = f"docker:{job.image}"
    resources["job_recovery"] = {
        "max_restarts_on_errors": job.max_restarts,
        "recover_on_exit_codes": [REQUEUE_EXIT_CODE],
    }
    found: dict[str, Any] = {"name": job.name, "num_nodes": job.machines, "resources": resources, "workdir": "."}
    if job.storage is not None:
        found["file_mounts"] = {job.storage[1]: {"source": job.storage[0], "mode": "MOUNT"}}
    if job.image is None and Path(REQUIREMENTS).is_file():
        found["setup"] = f"pip install --requirement {REQUIREMENTS}"
    return found | {"run": shlex.join(_command(job))}


def _command(job: ClusterJob) -> list[str]:
    """Return the launch; SkyPilot tells it the machines, and this the processes."""
    total = str(job.machines * job.processes_per_machine)
    return [*job.command[:2], "--num_processes", total, *job.command[2:]]
