"""`accelerate test`: start the self-test of this machine as a script would be started."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..config.launch.parser import verb_parser
from .launch import add_launch_options, launch_command, launch_command_parser, launch_flags

_MODULE = "accelerate.launch.selftest.script"


def test_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the verb, alone or as one of the command's verbs."""
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
    # Quiet, because the report says what failed, and where.
    launch_command(launch_command_parser().parse_args([*launch_flags(args), "--quiet", "-m", _MODULE]))


def main() -> None:
    """Run the verb alone."""
    test_command(test_command_parser().parse_args(sys.argv[1:]))
