"""`meshwright watch`: the short form of `meshwright report --live --ranks`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..config.launch.options import spellings
from ..config.launch.parser import verb_parser
from ..program import program_name
from .report import DEFAULT_RUN_DIR, seconds

_DESCRIPTION = (
    'Show the step time of every rank, by phase, during a run that logs with log_with="jsonl" on '
    "several processes. A rank that makes the others wait is marked. The same as report --live --ranks."
)


def watch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the verb, standalone or as a subcommand of `meshwright`."""
    parser = verb_parser(subparsers, "watch", _DESCRIPTION)
    parser.add_argument(
        "run_dir", nargs="?", default=DEFAULT_RUN_DIR, metavar="RUN_DIR",
        help=f"folder of a run, or a parent folder, for the newest run in it; default: {DEFAULT_RUN_DIR}",
    )  # fmt: skip
    parser.add_argument(
        *spellings("interval"), type=seconds, default=1.0, metavar="SECONDS", help="update interval; default: 1"
    )
    parser.set_defaults(run=watch_command)
    return parser


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    watch_command_parser(verbs)


def watch_command(args: argparse.Namespace) -> None:
    """Show the step times of the ranks."""
    from ..tools.report import ReportError
    from ..tools.report.terminal.ranks import show_ranks

    try:
        show_ranks([Path(args.run_dir)], interval=args.interval)
    except ReportError as error:
        raise SystemExit(f"{program_name()} watch: {error}") from None


def main() -> None:
    """Run the verb as a program of its own."""
    watch_command(watch_command_parser().parse_args())
