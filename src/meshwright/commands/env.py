"""`meshwright env`: print the facts of this machine that a bug report needs."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..config.environment import SETTING_VARIABLES, VISIBLE_DEVICES, read
from ..config.launch.files import default_config_path, find_config
from ..config.launch.options import spellings
from ..config.launch.parser import verb_parser

if TYPE_CHECKING:
    from ..runtime.process import ProcessInfo


def env_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the verb, standalone or as a subcommand of `meshwright`."""
    parser = verb_parser(subparsers, "env")
    parser.add_argument(*spellings("config_file"), help="show this file instead of the default one", metavar="FILE")
    parser.set_defaults(run=env_command)
    return parser


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    env_command_parser(verbs)


def env_command(args: argparse.Namespace) -> None:
    """Print one line per fact."""
    print(facts_as_text(getattr(args, "config_file", None)))


def facts_as_text(config_file: str | None) -> str:
    """Return one line per fact of this machine, and per setting of a configuration file."""
    import numpy
    import torch

    from ..launch.devices import count_cores
    from ..runtime.devices import machine
    from ..runtime.process import ProcessInfo

    cores, usable = count_cores(), len(machine.usable_cores())
    found: dict[str, Any] = {
        "meshwright": __version__,
        "Python": f"{platform.python_version()} ({sys.executable})",
        "PyTorch": torch.__version__,
        "NumPy": numpy.__version__,
        "Platform": platform.platform(),
        "CPU cores": f"{cores}" if cores == usable else f"{cores} (a quota; the affinity has {usable})",
        "Accelerators": _accelerators(),
        **_driver(),
        "Process": _described(ProcessInfo.from_environment()),
    }
    variables = [*(name for names in VISIBLE_DEVICES.values() for name in names), *_NCCL_VARIABLES]
    variables += [name for name, _ in SETTING_VARIABLES.values()]
    found |= {name: value for name in variables if (value := read(name)) is not None}
    config = find_config(config_file)
    found["Configuration file"] = config.path if config is not None else f"none ({default_config_path()})"
    if config is not None:
        found |= {f"  {key}": value for key, value in _lines(config.contents)}
    width = max(map(len, found))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in found.items())


def _described(process: ProcessInfo) -> str:
    """Describe a process: `rank 3 of 8, local rank 1 of 4, started by torchrun`."""
    if process.launcher is None:
        return "alone, not started by a launcher"
    return (
        f"rank {process.rank} of {process.world_size}, local rank {process.local_rank} of {process.local_world_size}, "
        f"started by {process.launcher}"
    )


def _lines(contents: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Return the keys of a file, `section.key` inside a section, and their values as YAML has them."""
    for key, value in contents.items():
        if isinstance(value, Mapping) and value:
            yield from _lines(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, default=str)


_NCCL_VARIABLES = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def _accelerators() -> str:
    """Describe the accelerators that torch sees: `8 x cuda (NVIDIA H100 80GB HBM3)`."""
    from ..runtime.devices import device

    kind, names = device.accelerator_type(), device.names()
    models = ", ".join(dict.fromkeys(name for name in names if name != kind))
    return f"{len(names)} x {kind}" + (f" ({models})" if models else "") if kind is not None else "none"


def _driver() -> dict[str, str]:
    """Return the lines of NVIDIA's driver and of TF32, where there is a GPU of theirs."""
    from ..runtime.devices import nvidia

    if not nvidia.is_present():
        return {}
    try:
        driver = nvidia.driver_version()
    except RuntimeError as error:
        driver = f"unknown ({error})"
    return {"NVIDIA driver": driver, "TF32": _tf32()}


def _tf32() -> str:
    """Tell which operations on fp32 tensors compute in TF32, by torch's own settings."""
    import torch

    matmul = torch.get_float32_matmul_precision() != "highest"
    convolutions = bool(torch.backends.cudnn.allow_tf32)
    return f"matrix products {'yes' if matmul else 'no'}, convolutions {'yes' if convolutions else 'no'}"


def main() -> None:
    """Run the verb as a program of its own."""
    env_command(env_command_parser().parse_args())
