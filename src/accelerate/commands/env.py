"""`accelerate env`: what a bug report needs to know of this machine."""

from __future__ import annotations

import argparse
import os
import platform
from typing import Any

from .. import __version__
from ..config.environment import SETTING_VARIABLES, read


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    parser = verbs.add_parser("env", help="print versions, devices and settings, for bug reports")
    parser.set_defaults(run=env_command)


def env_command(args: argparse.Namespace) -> None:
    """Print one line per fact."""
    import numpy
    import torch

    from ..runtime.device import accelerator_type
    from ..runtime.process import ProcessInfo

    kind = accelerator_type()
    devices = f"{torch.accelerator.device_count()} x {kind}" if kind is not None else "none"
    facts = {
        "accelerate": f"{__version__} (independent 2.x implementation)",
        "Python": platform.python_version(),
        "PyTorch": torch.__version__,
        "NumPy": numpy.__version__,
        "Platform": platform.platform(),
        "CPU cores": os.cpu_count(),
        "Accelerators": devices,
        "Process": ProcessInfo.from_environment(),
    }
    facts |= {name: value for name, _ in SETTING_VARIABLES.values() if (value := read(name)) is not None}
    width = max(map(len, facts))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in facts.items()))
