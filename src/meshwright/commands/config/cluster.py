"""The questions of `meshwright config`. Defaults come from the hardware of this machine."""

from __future__ import annotations

from typing import Any

from ...config.launch.cluster_config import ClusterConfig
from ...config.launch.options import AWS
from ...launch.config_files import config_from_options
from ...launch.devices import count_accelerators, count_cores
from ...program import program_name
from . import asking

_NOT_YET = "not in this version yet"
_PRECISIONS = {
    "no": "no (float32 throughout)",
    "fp16": "fp16 (with a loss scaler)",
    "bf16": "bf16 (no scaler; newer accelerators, and CPUs)",
    "fp8": "fp8 (linear layers, by torchao; the newest accelerators)",
}
_EXTRAS = {
    "debug": "check every collective operation across ranks (slow)",
    "enable_cpu_affinity": "pin each process to its share of the cores",
    "max_restarts": "start all processes again after a failure (accelerate 1.x cannot read it)",
    "log_dir": "write each rank's output to a folder (accelerate 1.x cannot read it)",
    "use_fsdp": "share one copy of the model among the processes (FSDP2): for models too large for one device",
    "dynamo_backend": "compile models with torch.compile (inductor)",
}
_FSDP_EXTRAS = {
    "fsdp_activation_checkpointing": "compute activations again in the backward pass, instead of keeping them",
    "fsdp_offload_params": "keep parameters, gradients and optimizer state in the host's memory",
    "fsdp_cpu_ram_efficient_loading": "load weights on the first process only",
}


def get_cluster_input() -> ClusterConfig:
    """Ask how a script should run, and return the answers."""
    return config_from_options(ask())


def ask() -> dict[str, Any]:
    """Ask only what depends on the answers so far; return option names and values."""
    accelerators = count_accelerators()
    on_cpu = _device(accelerators) == "cpu"
    answers: dict[str, Any] = {"cpu": True} if on_cpu else {"gpu_ids": "all"}
    machines = asking.count("How many machines?", 1)
    if machines > 1:
        answers |= {"num_machines": machines, **_rendezvous(machines)}
    elif accelerators > 1 and not on_cpu:
        answers["gpu_ids"] = _device_ids(accelerators)
    answers["num_processes"] = _processes(answers, accelerators)
    answers["mixed_precision"] = asking.choose(
        "Which number format for the forward pass?",
        _PRECISIONS,
        "no" if on_cpu else _best_precision(accelerators),
    )
    if answers["num_processes"] > 1:
        answers |= _extras()
    return answers


def _device(accelerators: int) -> str:
    found = f"{accelerators} found here" if accelerators else "none found here: a file for another machine"
    engines = {AWS: _NOT_YET}
    return asking.choose(
        "Where should your script run?",
        {
            "accelerator": f"on accelerators, one process each ({found})",
            "cpu": "on the CPU, in one process or several",
        },
        "accelerator" if accelerators else "cpu",
        engines,
    )


def _rendezvous(machines: int) -> dict[str, Any]:
    """Ask for the rendezvous of the machines."""
    from ...launch.plan import DEFAULT_MASTER_PORT

    started_by = asking.choose(
        "Who starts the processes on each machine?",
        {
            "hand": f"I do: {program_name()} launch on every machine",
            "slurm": "Slurm: rank and address are found by themselves",
            "mpirun": "mpirun, from here, by a file with host names",
        },
        "hand",
    )
    if started_by == "slurm":
        return {}
    here = (
        {"mpirun_hostfile": asking.prompt("Which file names the hosts?")}
        if started_by == "mpirun"
        else {"machine_rank": asking.count("Which machine is this one, from 0?", 0, low=0, high=machines - 1)}
    )
    return {
        **here,
        "main_process_ip": asking.prompt("Address of machine 0, as the others see it?", check=_no_spaces),
        "main_process_port": asking.count("Port on machine 0?", DEFAULT_MASTER_PORT, high=65535),
    }


def _no_spaces(address: str) -> str | None:
    return "Type one address or host name." if len(address.split()) > 1 else None


def _device_ids(accelerators: int) -> str:
    def check(typed: str) -> str | None:
        ids = typed.split(",")
        if typed == "all":
            return None
        if not all(word.isdecimal() for word in ids) or len(set(ids)) < len(ids):
            return "Type all, or different numbers such as 0,1."
        beyond = [word for word in ids if int(word) >= accelerators]
        return f"There is no {beyond[0]}: they count from 0 to {accelerators - 1}." if beyond else None

    return asking.prompt("Which accelerators, as 0,1 or all?", "all", check)


def _processes(answers: dict[str, Any], accelerators: int) -> int:
    machines = answers.get("num_machines", 1)
    if "cpu" in answers:
        per_machine, most = 1, None
    elif answers["gpu_ids"] != "all":
        return len(answers["gpu_ids"].split(","))
    else:
        per_machine, most = max(1, accelerators), accelerators * machines or None
    where = f" on all {machines} machines together" if machines > 1 else f" ({count_cores()} cores here)"
    return asking.count(
        f"How many processes{where}?", per_machine * machines, low=machines, high=most, multiple_of=machines
    )


def _best_precision(accelerators: int) -> str:
    if accelerators == 0:
        return "no"
    import torch

    from ...runtime.devices.device import default_device, supports_low_precision

    return "bf16" if supports_low_precision(default_device(), torch.bfloat16) else "fp16"


def _extras() -> dict[str, Any]:
    chosen = asking.choose_some("Anything else?", _EXTRAS)
    answers: dict[str, Any] = {name: True for name in chosen if name in ("debug", "enable_cpu_affinity")}
    if "max_restarts" in chosen:
        answers["max_restarts"] = asking.count("How many times at most?", 3)
    if "log_dir" in chosen:
        answers["log_dir"] = asking.prompt("Which folder?", "logs")
    if "dynamo_backend" in chosen:
        answers["dynamo_backend"] = "inductor"
    return answers | (_fsdp() if "use_fsdp" in chosen else {})


def _fsdp() -> dict[str, Any]:
    chosen = asking.choose_some("FSDP2: what should save more memory?", _FSDP_EXTRAS)
    return {"use_fsdp": True, "fsdp_version": "2", **dict.fromkeys(chosen, "true")}
