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
    found |= {name: value for name in variables if (value := read(name)) is not None}
    config = find_config(config_file)
    found["Configuration file"] = config.path if config is not None else f"none ({default_config_path()})"
    found |= {f"  {key}": value for key, value in (config.contents.items() if config is not None else ())}
    width = max(map(len, found))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in found.items())


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
