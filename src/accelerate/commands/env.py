"""`accelerate env`: print the facts of this machine that a bug report needs."""

from __future__ import annotations

import argparse
import platform
import sys
from typing import Any

from .. import __version__
from ..config.environment import SETTING_VARIABLES, VISIBLE_DEVICES, read
from ..config.launch.files import default_config_path, find_config
from ..config.launch.options import spellings
from ..config.launch.parser import verb_parser


def env_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the verb, standalone or as a subcommand of `accelerate`."""
    parser = verb_parser(subparsers, "env")
    parser.add_argument(*spellings("config_file"), help="show this file instead of the default one", metavar="FILE")
    parser.set_defaults(run=env_command)
    return parser


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    env_command_parser(verbs)


def env_command(args: argparse.Namespace) -> None:
    """Print one line per fact."""
    import numpy
    import torch

    from ..launch.devices import count_cores
    from ..runtime.devices import machine
    from ..runtime.process import ProcessInfo

    cores, usable = count_cores(), len(machine.usable_cores())
    facts: dict[str, Any] = {
        "accelerate": f"{__version__} (independent 2.x implementation)",
        "Python": f"{platform.python_version()} ({sys.executable})",
        "PyTorch": torch.__version__,
        "NumPy": numpy.__version__,
        "Platform": platform.platform(),
        "CPU cores": f"{cores}" if cores == usable else f"{cores} (a quota; the affinity has {usable})",
        "Accelerators": _accelerators(),
        **_driver(),
        "Process": ProcessInfo.from_environment(),
    }
    variables = [*(name for names in VISIBLE_DEVICES.values() for name in names), *_NCCL_VARIABLES]
    variables += [name for name, _ in SETTING_VARIABLES.values()]
    facts |= {name: value for name in variables if (value := read(name)) is not None}
    config = find_config(getattr(args, "config_file", None))
    facts["Configuration file"] = config.path if config is not None else f"none ({default_config_path()})"
    facts |= {f"  {key}": value for key, value in (config.contents.items() if config is not None else ())}
    width = max(map(len, facts))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in facts.items()))


_NCCL_VARIABLES = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def _accelerators() -> str:
    """Describe the accelerators that torch sees: `8 x cuda (NVIDIA H100 80GB HBM3)`."""
    from ..runtime.devices import device

    kind, names = device.accelerator_type(), device.names()
    models = ", ".join(dict.fromkeys(name for name in names if name != kind))
    return f"{len(names)} x {kind}" + (f" ({models})" if models else "") if kind is not None else "none"


def _driver() -> dict[str, str]:
    """Return the line of NVIDIA's driver, where there is one."""
    from ..runtime.devices import nvidia

    if not nvidia.is_present():
        return {}
    try:
        return {"NVIDIA driver": nvidia.driver_version()}
    except RuntimeError as error:
        return {"NVIDIA driver": f"unknown ({error})"}


def main() -> None:
    """Run the verb as a program of its own."""
    env_command(env_command_parser().parse_args())
