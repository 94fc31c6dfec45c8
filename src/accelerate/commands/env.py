"""`accelerate env`: print the facts of this machine that a bug report needs."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from typing import Any

from .. import __version__
from ..config.environment import SETTING_VARIABLES, read
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

    from ..runtime.devices.device import accelerator_type
    from ..runtime.process import ProcessInfo

    kind = accelerator_type()
    devices = f"{torch.accelerator.device_count()} x {kind}" if kind is not None else "none"
    facts = {
        "accelerate": f"{__version__} (independent 2.x implementation)",
        "Python": f"{platform.python_version()} ({sys.executable})",
        "PyTorch": torch.__version__,
        "NumPy": numpy.__version__,
        "Platform": platform.platform(),
        "CPU cores": os.cpu_count(),
        "Accelerators": devices,
        "Process": ProcessInfo.from_environment(),
    }
    facts |= {name: value for name, _ in SETTING_VARIABLES.values() if (value := read(name)) is not None}
    config = find_config(getattr(args, "config_file", None))
    facts["Configuration file"] = config.path if config is not None else f"none ({default_config_path()})"
    facts |= {f"  {key}": value for key, value in (config.contents.items() if config is not None else ())}
    width = max(map(len, facts))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in facts.items()))


def main() -> None:
    """Run the verb as a program of its own."""
    env_command(env_command_parser().parse_args())
