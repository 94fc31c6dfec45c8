"""`meshwright dropin`: write the distribution `accelerate` that is meshwright, as a wheel."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..config.launch.parser import verb_parser
from ..distribution import interface_version, write_wheel
from ..program import program_name

_DESCRIPTION = (
    "Write a wheel of the distribution `accelerate`: the published names, implemented by meshwright. Install it where "
    "a requirement such as accelerate==1.15.0 has to hold and nothing can open the door."
)


def dropin_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the verb, standalone or as a subcommand of `meshwright`."""
    parser = verb_parser(subparsers, "dropin", _DESCRIPTION)
    parser.add_argument("--wheel", type=Path, metavar="DIR", required=True, help="the folder to write the wheel into")
    parser.set_defaults(run=dropin_command)
    return parser


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    dropin_parser(verbs)


def dropin_command(args: argparse.Namespace) -> None:
    """Write the wheel, and say what it does to an environment."""
    try:
        wheel = write_wheel(args.wheel)
    except OSError as error:
        raise SystemExit(f"{program_name()} dropin: cannot write into {args.wheel}: {error.strerror}.") from None
    print(
        f"wrote  {wheel}\n"
        f"       accelerate {interface_version()}, which takes the place of an installed accelerate\n"
        f"use    pip install --no-deps {wheel}\n"
        "undo   pip install --force-reinstall --no-deps accelerate==1.15.0"
    )
