"""Read the resources of a launch on a Ray cluster, and refuse what it cannot do."""

from __future__ import annotations

from ...errors import UnsupportedSettingError
from .settings import FLAG, LaunchSettings

_OTHER_MACHINES = "Ray chooses the nodes and the port."
_OUTPUT = "Ray shows the output of every rank, and keeps it on the rank's node, in the folder logs of its session."
_REASONS = {
    "survive": "Ray starts all processes again. Use --max_restarts.",
    "memory_copies_every": "a process may start again on another node. Use checkpoints, or --memory_copies_dir with a "
    "launch on every machine.",
    "mpirun_hostfile": "mpirun is another way to start the processes.",
    "nnodes": "Ray chooses the nodes. For fewer processes than --num_processes, use --ray_min_processes.",
    "debug_rank": "the processes have no terminal.",
    "tpu": "torch_xla starts processes by itself.",
    "log_dir": _OUTPUT,
    "tee": _OUTPUT,
    "redirects": _OUTPUT,
}
_REASONS_FOR_FLAGS = {
    "num_machines": _OTHER_MACHINES,
    "machine_rank": _OTHER_MACHINES,
    "main_process_ip": _OTHER_MACHINES,
    "main_process_port": _OTHER_MACHINES,
    "gpu_ids": "Ray chooses the GPUs.",
}
"""A configuration file has these for other launches."""


def refuse_on_ray(settings: LaunchSettings) -> None:
    """Raise if a launch with `--ray` was given what has another meaning there, or none."""
    for name, reason in {**_REASONS, **_REASONS_FOR_FLAGS}.items():
        value = settings.resolved[name]
        origin = FLAG if name in _REASONS_FOR_FLAGS else ""
        if value.value is None or value.value is False or value.value == "0" or not value.origin.startswith(origin):
            continue
        raise UnsupportedSettingError(f"{name} ({value.origin}) with --ray", reason, f"Leave {name} out.")
    resources_per_process(settings)
    most, least = settings.num_processes, settings.ray_min_processes
    if least is not None and not (most is not None and 1 <= least <= most):
        raise ValueError(
            f"ray_min_processes is {least} ({settings.origin('ray_min_processes')}): it needs --num_processes, and "
            "must be from 1 to that number."
        )


def resources_per_process(settings: LaunchSettings) -> dict[str, float] | None:
    """Read `--ray_resources`, such as `CPU=4,GPU=1`; None where nothing is requested."""
    words = settings.ray_resources
    if words is None:
        return None
    found: dict[str, float] = {}
    try:
        for pair in words.split(","):
            name, number = pair.split("=")
            found[name.strip()] = float(number)
    except ValueError as error:
        raise ValueError(
            f"ray_resources is {words!r} ({settings.origin('ray_resources')}): write names and numbers, such as "
            "CPU=4,GPU=1."
        ) from error
    return found
