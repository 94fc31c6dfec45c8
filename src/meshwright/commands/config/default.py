"""`meshwright config default`: write a file without questions."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ...config.launch.cluster_config import default_json_config_file
from ...config.launch.files import default_config_path, read_config, write_config
from ...config.launch.options import BY_NAME, spellings
from ...config.launch.parser import add_options, explicit_options
from ...launch.config_files import FLAGS, config_from_options, launch_by_file, launch_problems
from ...program import program_name
from .errors import exit_on_errors, print_error

_DESCRIPTION = "Write a configuration file without questions, from the hardware of this machine and the given flags."


def write_basic_config(
    mixed_precision: str = "no", save_location: str | Path = default_json_config_file
) -> Path | Literal[False]:
    """Write a file from what this machine has; leave one that is already there, and return False."""
    mixed_precision = mixed_precision.lower()
    choices = BY_NAME["mixed_precision"].choices or ()
    if mixed_precision not in choices:
        raise ValueError(f"mixed_precision={mixed_precision!r} is unknown: choose one of {', '.join(choices)}.")
    return _write_unless_there({"mixed_precision": mixed_precision}, Path(save_location), overwrite=False) or False


def _write_unless_there(flags: Mapping[str, Any], path: Path, *, overwrite: bool) -> Path | None:
    path = path.expanduser()
    if path.exists() and not overwrite:
        print(
            f"{path} is there already and was left as it is. Name another file, or replace it with "
            f"`{program_name()} config default --overwrite`."
        )
        return None
    return write_config(path, config_from_options(flags).to_dict())


def write_by_flags(args: argparse.Namespace, path: str | Path | None) -> None:
    """Write a file from the flags of a command line, and print its path."""
    flags = explicit_options(args, FLAGS)
    with exit_on_errors():
        written = _write_unless_there(
            flags, Path(path or default_config_path()), overwrite=getattr(args, "overwrite", False)
        )
        if written is None:
            if set(flags) - {
                "mixed_precision"
            }:  # given flags were not written; without flags it is no failure, as published
                raise SystemExit(1)
            return
        file = read_config(written)
        print(f"Wrote {written}. Launch by it: {launch_by_file(file)}")
        for problem in launch_problems(file):
            print_error(problem)


def default_config_command(args: argparse.Namespace) -> None:
    """Run `meshwright config default`."""
    write_by_flags(args, args.save_location)


def add_writing_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--overwrite` and a flag for every key of a file."""
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    parser.epilog = f"The flags of engines, which `{program_name()} launch --help-all` lists, are taken too."
    add_options(parser, FLAGS)


def default_command_parser(parser: Any, parents: Any = ()) -> argparse.ArgumentParser:
    """Add `default` to the subcommands in `parser`."""
    default: argparse.ArgumentParser = parser.add_parser(
        "default", parents=parents, help="write a file without questions", description=_DESCRIPTION
    )
    default.add_argument(
        *spellings("config_file"),
        dest="save_location",
        metavar="FILE",
        help="file to write; by default the default file",
    )
    add_writing_flags(default)
    default.usage = f"{program_name()} config default [--config_file FILE] [--overwrite] [what the file should say]"
    default.set_defaults(run=default_config_command)
    return default
