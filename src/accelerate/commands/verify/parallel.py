"""`accelerate verify-parallel`: compare the first steps of a script on a mesh with those of one process."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ...config.launch.options import spellings
from ...config.launch.parser import verb_parser
from ...errors import LaunchError
from ..launch import add_launch_options, add_script

_DESCRIPTION = (
    "Run the first steps of a script on the processes that the settings of a launch ask for, and on one process that "
    "does the same work. Compare the loss, every gradient, the norm and the parameters after each step, and name the "
    "first module that differs. Everything runs on the CPU of this machine, in fp32, without dropout."
)
UNEQUAL, NOT_COMPARED = 1, 2
"""Exit codes: a difference was found; nothing could be compared."""


def verify_parallel_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the verb, standalone or as a subcommand of `accelerate`."""
    parser = verb_parser(subparsers, "verify-parallel", _DESCRIPTION)
    parser.usage = (
        "accelerate verify-parallel [--steps N] [--json FILE] [options of accelerate launch] SCRIPT [ARGUMENTS]"
    )
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps to compare (default: 2)")
    parser.add_argument("--json", metavar="FILE", help="write the result to this file, too")
    parser.add_argument(
        *spellings("full_size"),
        action="store_true",
        help="keep models of transformers as they are; without it they get few layers and smaller widths",
    )
    parser.add_argument(
        *spellings("seconds_per_run"), type=float, default=300.0, help="end a run that takes longer (default: 300)"
    )
    add_launch_options(parser)
    add_script(parser)
    parser.set_defaults(run=verify_parallel_command)
    return parser


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    verify_parallel_parser(verbs)


def verify_parallel_command(args: argparse.Namespace) -> None:
    """Run the script on the mesh and on one process, compare, and exit with the result."""
    for variable, value in (("OMP_NUM_THREADS", "1"), ("TOKENIZERS_PARALLELISM", "false")):
        os.environ.setdefault(variable, value)  # before torch is imported: threads do not survive a fork
    from ...accelerator.verification.comparing.comparison import compare
    from ...accelerator.verification.comparing.panel import panel
    from .runs import Runs

    started = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="accelerate_verify_") as folder:
            runs = Runs(args, Path(folder))
            mesh = runs.on_mesh()
            result = compare(mesh, *runs.on_one_process(mesh))
    except (ValueError, OSError, LaunchError) as error:
        print(f"accelerate verify-parallel: {error}", file=sys.stderr)
        raise SystemExit(NOT_COMPARED) from error
    if args.json:
        Path(args.json).write_text(json.dumps(result.to_dict(), indent=2) + "\n", encoding="utf-8")
    print(panel(result, time.monotonic() - started))
    raise SystemExit(0 if result.equal else UNEQUAL)
