"""`--explain`: every effective value with its origin, and the plan of processes and batches."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from ..config.environment import read
from ..config.launch.files import ConfigFile, default_config_path
from ..config.launch.options import OPTIONS
from ..config.launch.settings import DEFAULT, LaunchSettings
from ..config.origins import ORIGINS_VARIABLE
from ..errors import UnsupportedSettingError
from ..program import program_name
from .plan import LaunchPlan, worker_command

_METHODS = {
    "exec": "the script replaces this process",
    "elastic": "torchelastic starts and watches the processes",
    "srun": "srun starts this launch once on every machine",
    "mpirun": "mpirun starts the processes",
    "ray": "Ray starts one actor per process, on nodes that it chooses",
}


def explain(settings: LaunchSettings, plan: LaunchPlan, config: ConfigFile | None, remarks: Sequence[str]) -> str:
    """Describe what a launch would do, and why."""
    sections = [
        _table("settings", _effective(settings, plan)),
        f"  every other option ({len(OPTIONS)} in all, {program_name()} launch --help-all) has its default",
        _table("plan", _plan_rows(settings, plan, config)),
        _table("handed to every process", _variables(plan)),
    ]
    lines = [f"  - {remark}" for remark in remarks]
    try:
        settings.refuse_missing_engines(config)
        if (megatron := settings.megatron()) is not None:
            sections.append(_table("Megatron-LM's settings, on torch's engines", megatron.translation()))
    except UnsupportedSettingError as refusal:
        lines.append(f"  - this launch would be refused: {refusal}")
    if lines:
        sections.append("\n".join(["remarks", *lines]))
    return "\n\n".join(sections)


def _effective(settings: LaunchSettings, plan: LaunchPlan) -> list[tuple[str, str, str]]:
    decided = {
        "num_processes": plan.num_processes,
        "num_machines": plan.num_machines,
        "machine_rank": plan.machine_rank,
        "main_process_ip": plan.address,
        "main_process_port": plan.port,
        "num_cpu_threads_per_process": plan.threads,
        "mixed_precision": settings.mixed_precision,
        "rdzv_backend": plan.backend,
    }
    rows = []
    for option in OPTIONS:
        value = decided.get(option.name, settings.resolved[option.name].value)
        origin = plan.origins.get(option.name) or settings.origin(option.name)
        if option.engine is None or origin != DEFAULT:
            rows.append((option.name, "-" if value is None else str(value), origin))
    return rows


def _plan_rows(settings: LaunchSettings, plan: LaunchPlan, config: ConfigFile | None) -> list[tuple[str, str, str]]:
    steps = (settings.gradient_accumulation_steps or 1) * _micro_batches(settings)
    shares = max(1, plan.num_processes // _processes_per_sample(settings))
    who = "processes" if shares == plan.num_processes else "groups of processes with the same samples"
    source = str(config.path) if config is not None else f"none ({default_config_path()} does not exist)"
    factor = shares * steps
    return [
        ("configuration file", source, ""),
        ("method", _METHODS[plan.method], ""),
        ("processes", _processes(settings, plan), ""),
        ("device", plan.device, ""),
        ("rendezvous", f"{plan.address}:{plan.port}" if plan.method == "elastic" else "not needed", ""),
        ("command", shlex.join(worker_command(settings, plan.script, recorded=False)), ""),
        (
            "one optimizer step",
            f"{shares} {who} x {steps} micro-batches x the loader's batch size = {factor} x batch_size samples",
            "unless the script sets gradient_accumulation_steps or split_batches",
        ),
    ]


def _processes(settings: LaunchSettings, plan: LaunchPlan) -> str:
    if plan.method != "ray":
        return f"{plan.num_machines} machine(s) x {plan.processes_here} = {plan.num_processes}"
    if settings.num_processes is None:
        return "one per GPU of the cluster, else one per node"
    least = settings.ray_min_processes or settings.num_processes
    return f"{plan.num_processes} on the nodes of the cluster" + (f", at least {least}" * (least < plan.num_processes))


def _processes_per_sample(settings: LaunchSettings) -> int:
    """Return how many processes work on the same samples, by the axes of a mesh."""
    values = {name: item.value for name, item in settings.resolved.items()}
    names = []
    if values["use_parallelism_config"]:
        names += [f"parallelism_config_{axis}_size" for axis in ("tp", "cp", "sp", "pp")]
    if values["use_megatron_lm"]:
        names += [f"megatron_lm_{name}" for name in ("tp_degree", "context_parallel_size", "pp_degree")]
    return math.prod(values[name] or 1 for name in names)


def _micro_batches(settings: LaunchSettings) -> int:
    used = settings.resolved["use_megatron_lm"].value
    return int(settings.resolved["megatron_lm_num_micro_batches"].value or 1) if used else 1


def _variables(plan: LaunchPlan) -> list[tuple[str, str, str]]:
    return [
        (name, value, "replaces what the shell has" if read(name) not in (None, value) else "")
        for name, value in sorted(plan.variables.items())
        if name != ORIGINS_VARIABLE
    ]


def _table(title: str, rows: Sequence[tuple[str, str, str]]) -> str:
    first = max(len(name) for name, _, _ in rows)
    second = min(40, max(len(value) for _, value, _ in rows))
    lines = [f"  {name:<{first}}  {value:<{second}}  {origin}".rstrip() for name, value, origin in rows]
    return "\n".join([title, *lines])
