"""`accelerate test`: start the self-test of this machine as a script would be started."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..config.options import OPTIONS, spellings
from .launch import launch_command, launch_command_parser
from .parser import Parser, add_options, typed

_MODULE = "accelerate.launch.selftest"


def test_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the verb, alone or as one of the command's verbs."""
    text = "test this machine: processes, collectives, data and training"
    parser: argparse.ArgumentParser = (
        Parser("accelerate test", description=text) if subparsers is None else subparsers.add_parser("test", help=text)
    )
    parser.usage = "accelerate test [options of accelerate launch]"
    parser.add_argument(*spellings("config_file"), help="settings from this YAML file", metavar="FILE")
    add_options(parser, OPTIONS)
    parser.set_defaults(run=test_command)
    return parser


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    test_command_parser(verbs)


def test_command(args: argparse.Namespace) -> None:
    """Launch the self-test with the settings that a script would get."""
    words = [] if args.config_file is None else ["--config_file", args.config_file]
    launch = launch_command_parser().parse_args([*words, "-m", _MODULE])
    for name, value in typed(args, OPTIONS).items():
        setattr(launch, name, value)
        launch._given |= {name}
    launch.quiet, launch._given = True, launch._given | {"quiet"}  # the report says what failed, and where
    launch_command(launch)


def main() -> None:
    """Run the verb alone."""
    test_command(test_command_parser().parse_args(sys.argv[1:]))
