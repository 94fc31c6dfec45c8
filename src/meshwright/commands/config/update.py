"""`meshwright config update`: rewrite an old configuration file with the current keys."""

from __future__ import annotations

import argparse
from typing import Any

from ...config.launch.cluster_config import config_class_of, config_of, keys_of, remarks_on
from ...config.launch.files import default_config_path, load_mapping, read_config, write_config
from ...config.launch.options import spellings
from .errors import exit_on_errors, print_error

_DESCRIPTION = "Rewrite an old file with the current keys. Existing values stay; missing keys get their defaults."


def update_config(args: argparse.Namespace) -> str:
    """Rewrite the file of `--config_file`, by default the default one, and return its path."""
    file = read_config(args.config_file or default_config_path())
    config_class = config_class_of(file)
    contents = config_of(file, config_class).to_dict()
    for remark in remarks_on(file, config_class):
        print_error(remark)
    for key, value in file.contents.items():
        if key not in keys_of(config_class):
            print_error(f"left out `{key}: {value}`.")
    if contents != load_mapping(file.path):
        if any(line.lstrip().startswith("#") for line in file.path.read_text(encoding="utf-8").splitlines()):
            print_error(f"the comments in {file.path} were not kept.")
        write_config(file.path, contents)
    return str(file.path)


def update_config_command(args: argparse.Namespace) -> None:
    """Run `meshwright config update`."""
    with exit_on_errors():
        print(f"{update_config(args)} is up to date.")


def update_command_parser(parser: Any, parents: Any = ()) -> argparse.ArgumentParser:
    """Add `update` to the subcommands in `parser`."""
    update: argparse.ArgumentParser = parser.add_parser(
        "update", parents=parents, help="rewrite an old file with the current keys", description=_DESCRIPTION
    )
    update.add_argument(*spellings("config_file"), metavar="FILE", help="the file; by default the default file")
    update.set_defaults(run=update_config_command)
    return update
