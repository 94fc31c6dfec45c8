"""`meshwright config`, `config default` and `config update`: the file that `meshwright launch` reads."""

from __future__ import annotations

import argparse
from typing import Any

from ...config.launch.cluster_config import default_config_file, load_config_from_file
from ...config.launch.parser import GIVEN
from ...program import program_name
from .config import config_command_parser
from .default import default_command_parser
from .update import update_command_parser

__all__ = [
    "add_parser",
    "config_command_parser",
    "default_command_parser",
    "default_config_file",
    "get_config_parser",
    "load_config_from_file",
    "main",
    "update_command_parser",
]


class _FlagsAfterSubcommand(argparse._SubParsersAction):  # type: ignore[type-arg]
    """Refuse flags before a subcommand: argparse would drop them silently."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        if getattr(namespace, GIVEN, None) or namespace.config_file is not None or namespace.overwrite:
            parser.error(f"write the flags after `{values[0]}`: {program_name()} config {values[0]} --flag ...")
        super().__call__(parser, namespace, values, option_string)


def get_config_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the verb with its subcommands, standalone or as a subcommand of `meshwright`."""
    parser = config_command_parser(subparsers)
    subcommands = parser.add_subparsers(
        title="subcommands",
        dest="subcommand",
        metavar="{default,update}",
        prog=parser.prog,
        action=_FlagsAfterSubcommand,
    )
    default_command_parser(subcommands)
    update_command_parser(subcommands)
    return parser


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    get_config_parser(verbs)


def main() -> None:
    """Run the verb as a program of its own."""
    args = get_config_parser().parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
