"""`accelerate plan`: tell what a training run takes, without running it."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from ...config.launch.options import spellings
from ...config.launch.parser import verb_parser
from ...errors import LaunchError
from ..launch import add_launch_options, add_script


def plan_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the verb, standalone or as a subcommand of `accelerate`."""
    parser = verb_parser(
        subparsers,
        "plan",
        "Run the first two steps of a script without devices and without data, as ranks of a world of any size. Say "
        "how much memory each rank needs, what is communicated, and how long a step takes.",
    )
    parser.usage = "accelerate plan --gpus 8xH100 [--search] [options of accelerate launch] SCRIPT [ARGUMENTS]"
    parser.add_argument(
        *spellings("seconds_per_run"), type=float, default=600.0, help="end a trace that takes longer (default: 600)"
    )
    add_launch_options(parser)
    add_script(parser)
    parser.set_defaults(run=plan_command)
    return parser


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    plan_parser(verbs)


def plan_command(args: argparse.Namespace) -> None:
    """Trace the script, and print the plan."""
    for variable, value in (("OMP_NUM_THREADS", "1"), ("TOKENIZERS_PARALLELISM", "false")):
        os.environ.setdefault(variable, value)  # before torch is imported: threads do not survive a fork
    from .traces import Part, Traces

    try:
        with tempfile.TemporaryDirectory(prefix="accelerate_plan_") as folder:
            traces = Traces(
                args, Path(folder), world_size=args.num_processes or 1, ranks_per_node=8, on_accelerators=not args.cpu
            )
            trace = traces.get([Part(rank=0, blocks=None)])
            print(len(trace[0].operations))
    except (ValueError, OSError, LaunchError) as error:
        print(f"accelerate plan: {error}", file=sys.stderr)
        raise SystemExit(2) from error
