"""`accelerate test`: launch the self-test of this machine."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..config.launch.parser import verb_parser
from .launch import add_launch_options, launch_command, launch_command_parser, launch_flags

_MODULE = "accelerate.launch.selftest.script"


def test_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the verb, standalone or as a subcommand of `accelerate`."""
    parser = verb_parser(subparsers, "test")
    parser.usage = "accelerate test [options of accelerate launch]"
    add_launch_options(parser)
    parser.set_defaults(run=test_command)
    return parser


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    test_command_parser(verbs)


def test_command(args: argparse.Namespace) -> None:
    """Launch the self-test with the settings that a script would get."""
    # --quiet, because the report of the self-test names failures.
    launch_command(launch_command_parser().parse_args([*launch_flags(args), "--quiet", "-m", _MODULE]))


def main() -> None:
    """Run the verb as a program of its own."""
    test_command(test_command_parser().parse_args(sys.argv[1:]))
