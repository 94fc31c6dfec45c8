"""`meshwright config`: answer questions, and have the answers written to a file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ...config.launch.cluster_config import ClusterConfig
from ...config.launch.files import default_config_path, read_config, write_config
from ...config.launch.options import spellings
from ...config.launch.parser import explicit_options, verb_parser
from ...launch.config_files import FLAGS, launch_by_file, launch_by_flags, launch_problems
from ...program import program_name
from .default import add_writing_flags, write_by_flags
from .errors import exit_on_errors, print_error

_DESCRIPTION = (
    f"Answer questions and write the answers to the file that `{program_name()} launch` reads. With flags, nothing is "
    "asked and their values are written."
)
INTERRUPTED = 130
"""As a shell reports a program that Ctrl-C has ended."""


def get_user_input() -> ClusterConfig:
    """Ask how a script should run, and return the answers."""
    from .cluster import get_cluster_input

    return get_cluster_input()


def config_command(args: argparse.Namespace) -> None:
    """Run `meshwright config`: by flags where there are any, else by questions."""
    if explicit_options(args, FLAGS):
        write_by_flags(args, args.config_file)
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print_error(
            f"there is no terminal to ask questions on. Write a file with `{program_name()} config default`, with "
            f"flags for what it should say, such as `{program_name()} config default --cpu --num_processes 2`."
        )
        raise SystemExit(2)
    path = Path(args.config_file or default_config_path()).expanduser()
    with exit_on_errors():
        try:
            _ask_and_write(path, overwrite=getattr(args, "overwrite", False))
        except (KeyboardInterrupt, EOFError) as interrupt:
            print("Interrupted: nothing was written.")
            raise SystemExit(INTERRUPTED) from interrupt


def _ask_and_write(path: Path, *, overwrite: bool) -> None:
    from .asking import confirm

    if path.exists() and not overwrite and not confirm(f"{path} is there already. Replace it?"):
        print("Nothing was written.")
        return
    file = read_config(write_config(path, get_user_input().to_dict()))
    lines = path.read_text(encoding="utf-8").splitlines()
    print(f"\nWrote {path}:\n")
    print("\n".join(f"    {line}" for line in lines))
    print(f"\nLaunch by it:\n\n    {launch_by_file(file)}\n\nor, without a file:\n\n    {launch_by_flags(file)}\n")
    for problem in launch_problems(file):
        print_error(problem)


def config_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the verb, standalone or as a subcommand of `meshwright`."""
    parser = verb_parser(subparsers, "config", _DESCRIPTION)
    parser.add_argument(
        *spellings("config_file"), metavar="FILE", help="file to write; by default the file that every launch reads"
    )
    add_writing_flags(parser)
    parser.usage = f"{program_name()} config [default | update] [--config_file FILE] [settings]"
    parser.set_defaults(run=config_command)
    return parser


def main() -> None:
    """Run `meshwright config` as a program of its own, without subcommands."""
    config_command(config_command_parser().parse_args())


if __name__ == "__main__":
    main()
