"""Build a configuration file from answers or flags, and the equivalent flags from a file."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config.enums import DistributedType
from ..config.launch.cluster_config import ClusterConfig
from ..config.launch.files import SWITCH_OF_KIND, ConfigFile, default_config_path
from ..config.launch.options import BY_NAME, OPTIONS, Option, as_flags
from ..errors import UnsupportedSettingError
from .devices import count_accelerators

# Every option of a launch that has a key in a file. Options of engines are accepted, but hidden in the help.
FLAGS = tuple(
    option if option.engine is None else replace(option, help=argparse.SUPPRESS)
    for option in OPTIONS
    if option.yaml is not None or option.name in ("multi_gpu", *SWITCH_OF_KIND.values())
)

# Written in capitals, as accelerate 1.15 does.
_IN_CAPITALS = frozenset({"dynamo_backend", "fp8_backend"})


def config_from_options(values: Mapping[str, Any]) -> ClusterConfig:
    """Build a file's contents from option names and values; the rest comes from the hardware of this machine."""
    if values.get("cpu") and values.get("multi_gpu"):
        raise ValueError("--cpu and --multi_gpu contradict each other: leave one of them out.")
    kind = next((kind for kind, switch in SWITCH_OF_KIND.items() if values.get(switch)), None)
    accelerators = 0 if values.get("cpu") else count_accelerators()
    wants_accelerators = kind is not None or values.get("multi_gpu") or values.get("gpu_ids")
    cpu = bool(values.get("cpu") or not (accelerators or wants_accelerators))
    machines = values.get("num_machines", 1)
    processes = values.get("num_processes", _one_per_device(values.get("gpu_ids"), accelerators, machines, cpu))
    _check_numbers(processes, machines, values.get("machine_rank", 0))
    contents: dict[str, Any] = {"use_cpu": cpu, "num_processes": processes, "mixed_precision": "no", "debug": False}
    for name, value in values.items():
        _set_key(contents, BY_NAME[name], value)
    if kind is None:
        several = processes != 1 or machines > 1 or values.get("multi_gpu")
        kind = _data_parallelism(cpu, accelerators) if several else DistributedType.NO.value
    return ClusterConfig(compute_environment="LOCAL_MACHINE", distributed_type=kind, **contents)


def _one_per_device(ids: str | None, accelerators: int, machines: int, cpu: bool) -> int:
    if cpu:
        return machines
    if ids not in (None, "all"):
        return len(str(ids).split(",")) * machines
    return accelerators * machines or -1  # -1, as published: one per accelerator of the machine that launches


def _check_numbers(processes: int, machines: int, rank: int) -> None:
    if machines < 1:
        raise ValueError(f"--num_machines is {machines}: it must be 1 or more.")
    if processes < 1 and processes != -1:
        raise ValueError(f"--num_processes is {processes}: it must be 1 or more.")
    if processes != -1 and processes % machines:
        raise ValueError(
            f"--num_processes is {processes}, but it counts the processes of all {machines} machines together: "
            f"use a multiple of {machines}."
        )
    if not 0 <= rank < machines:
        raise ValueError(f"--machine_rank is {rank}, but there are {machines} machine(s): use 0 to {machines - 1}.")


def _data_parallelism(cpu: bool, accelerators: int) -> str:
    """Return the `distributed_type` of data parallelism on this machine."""
    if cpu:
        return DistributedType.MULTI_CPU.value
    if accelerators == 0:  # a file for another machine
        return DistributedType.MULTI_GPU.value
    from ..runtime.devices.device import default_device, distributed_type_of

    return distributed_type_of(default_device()).value


def _set_key(contents: dict[str, Any], option: Option, value: Any) -> None:
    """Set the key of an option, in the form in which accelerate 1.15 writes it."""
    if option.yaml is None:
        return
    section, _, key = option.yaml.rpartition(".")
    if not section:
        contents[key] = value
        return
    if option.name in _IN_CAPITALS:
        value = value.upper()
    elif value in ("true", "false"):
        value = value == "true"
    elif isinstance(value, str) and value.isdigit():
        value = int(value)
    elif isinstance(value, tuple):
        value = list(value)
    contents.setdefault(section, {})[key] = value


def launch_problems(file: ConfigFile) -> list[str]:
    """Return a message if this version cannot launch the file, else one for each value without effect."""
    from ..config.launch.settings import LaunchSettings

    settings = LaunchSettings.resolve(file.values, file)
    try:
        settings.refuse_missing_engines(file)
    except UnsupportedSettingError as error:
        return [f"This version will not launch by this file: {error}"]
    return settings.without_effect()


def launch_by_file(file: ConfigFile) -> str:
    """Return the command that launches with a file."""
    return _command([] if file.path == default_config_path() else ["--config_file", str(file.path)])


def launch_by_flags(file: ConfigFile) -> str:
    """Return the command whose flags are equivalent to a file."""
    defaults = {**vars(ClusterConfig("LOCAL_MACHINE", "NO", "no", False, False)), "gpu_ids": "all"}
    if "main_process_ip" in file.values:  # launched by hand on each machine, with its own rank
        del defaults["machine_rank"]
    given = {}
    for option in OPTIONS:
        value = file.values.get(option.name)
        if value is not None and value is not False and value not in (option.default, defaults.get(option.yaml or "")):
            given[option.name] = value
    return _command(as_flags(given))


def _command(flags: list[str]) -> str:
    return shlex.join(["meshwright", "launch", *flags, "train.py"])
