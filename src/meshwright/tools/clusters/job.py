"""What a job has to say about a launch, whichever cluster it is written for."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config.launch.options import MANIFESTS, OPTIONS, as_flags
from ...config.launch.settings import FLAG, LaunchSettings

MAX_NAME = 40
"""The names of pods are longer than that of their job, and have at most 63 characters."""
SECONDS_AFTER_GRACE = 30
"""For the launcher to end the processes that did not, and to report."""
# Said by the job itself, or by each machine.
_NOT_PASSED_ON = frozenset(
    {"num_machines", "num_processes", "machine_rank", "main_process_ip", "same_network", "gpu_ids", "max_restarts"}
    | {"explain", "lenient"}
    | {option.name for option in OPTIONS if option.engine == MANIFESTS}
)
_REFUSED = {
    "nnodes": "the job has a fixed number of machines: give --num_machines.",
    "mpirun_hostfile": "the machines of the job connect without mpirun.",
    "deepspeed_hostfile": "the cluster chooses the machines.",
}


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """A launch as a job of a cluster."""

    name: str
    machines: int
    processes_per_machine: int
    accelerators: tuple[str, int] | None
    """Name and number per machine; None on the CPU."""
    image: str | None
    storage: tuple[str, str] | None
    """Source and path of what outlives the machines."""
    command: tuple[str, ...]
    port: int
    max_restarts: int
    """Restarts of all machines after a failure; an end with exit code 75 is none."""
    seconds_to_end: int
    """Between SIGTERM and SIGKILL."""

    @classmethod
    def from_settings(cls, settings: LaunchSettings, script: Sequence[str]) -> ClusterJob:
        """Read a launch as a job; refuse what a job cannot have, and ask for what it needs."""
        values = {name: item.value for name, item in settings.resolved.items()}
        _refuse(settings, values)
        machines = settings.num_machines or 1
        accelerators = _accelerators(settings, values["accelerators"], machines)
        processes = _processes_per_machine(settings, machines, accelerators)
        return cls(
            name=_name(values["job_name"], script[0], is_module=settings.module),
            machines=machines,
            processes_per_machine=processes,
            accelerators=accelerators,
            image=values["image"],
            storage=_storage(values["storage"]),
            command=("meshwright", "launch", *as_flags(_passed_on(settings)), *script),
            port=settings.main_process_port or 29500,
            max_restarts=settings.max_restarts,
            seconds_to_end=math.ceil(settings.grace_period) + SECONDS_AFTER_GRACE,
        )


def text_of(documents: Iterable[dict[str, Any]]) -> str:
    """Return documents as YAML."""
    import yaml

    return yaml.safe_dump_all(documents, sort_keys=False, explicit_start=True, default_flow_style=False, width=1000)


def _refuse(settings: LaunchSettings, values: dict[str, Any]) -> None:
    chosen = [name for name in ("kubernetes", "skypilot") if values[name]]
    if len(chosen) != 1:
        raise ValueError(
            "--dry_run prints a job: give --kubernetes or --skypilot with it. --explain explains a launch."
        )
    if not values["dry_run"]:
        how = {"kubernetes": "kubectl apply -f FILE", "skypilot": "sky jobs launch FILE"}[chosen[0]]
        raise ValueError(
            f"--{chosen[0]} submits nothing: add --dry_run, write what it prints to a file, and run `{how}`."
        )
    for name, reason in _REFUSED.items():
        if values[name] is not None:
            raise ValueError(
                f"{name} = {values[name]} ({settings.origin(name)}) cannot be used with --{chosen[0]}: {reason}"
            )


def _passed_on(settings: LaunchSettings) -> dict[str, Any]:
    """Return the options of the launch on every machine: what was given, and is not about this machine."""
    given = {
        name: item for name, item in settings.resolved.items() if settings.given(name) and name not in _NOT_PASSED_ON
    }
    if "num_cpu_threads_per_process" in given and not settings.origin("num_cpu_threads_per_process").startswith(FLAG):
        del given["num_cpu_threads_per_process"]  # OMP_NUM_THREADS of this machine
    return {name: item.value for name, item in given.items() if item.value is not None}


def _accelerators(settings: LaunchSettings, word: str | None, machines: int) -> tuple[str, int] | None:
    if settings.cpu:
        if word is not None:
            raise ValueError(f"--accelerators {word} and --cpu contradict each other.")
        return None
    if word is not None:
        name, _, number = word.partition(":")
        if not name or not (number or "1").isdigit() or int(number or 1) < 1:
            raise ValueError(f"--accelerators {word!r} cannot be read: write nvidia.com/gpu:8, or for SkyPilot A100:8.")
        return name, int(number or 1)
    if settings.resolved["skypilot"].value:
        raise ValueError("SkyPilot needs to know which accelerators to rent: give --accelerators A100:8, or --cpu.")
    if settings.num_processes is None:
        raise ValueError(
            "The machines of the job are not known here, so their number of processes is not either: give "
            "--num_processes (of all machines together), --accelerators nvidia.com/gpu:8 (per machine), or --cpu."
        )
    return "nvidia.com/gpu", max(1, settings.num_processes // machines)


def _processes_per_machine(settings: LaunchSettings, machines: int, accelerators: tuple[str, int] | None) -> int:
    if settings.num_processes is None:
        return accelerators[1] if accelerators is not None else 1
    here, rest = divmod(settings.num_processes, machines)
    if rest or here < 1:
        raise ValueError(
            f"num_processes is {settings.num_processes} ({settings.origin('num_processes')}), but it counts the "
            f"processes of all {machines} machines together: use a multiple of {machines}."
        )
    if accelerators is not None and here > accelerators[1]:
        raise ValueError(
            f"{here} processes per machine need {here} accelerators, but --accelerators says {accelerators[1]}."
        )
    return here


def _storage(word: str | None) -> tuple[str, str] | None:
    if word is None:
        return None
    source, _, path = word.rpartition(":")
    if not source or not path.startswith("/"):
        raise ValueError(
            f"--storage {word!r} cannot be read: write claim:/checkpoints, or for SkyPilot s3://bucket:/checkpoints."
        )
    return source, path


def _name(asked: str | None, script: str, *, is_module: bool) -> str:
    own = script.rpartition(".")[2] if is_module else Path(script).stem
    made = re.sub(r"[^a-z0-9]+", "-", own.lower()).strip("-")[:MAX_NAME].strip("-")
    name = asked if asked is not None else made or "train"
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > MAX_NAME:
        raise ValueError(
            f"The name {name!r} of the job has to begin with a letter, and to have at most {MAX_NAME} small letters, "
            "digits and dashes: give --job_name."
        )
    return name
