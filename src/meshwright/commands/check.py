"""`meshwright check`: one verb for what can be wrong with a script, a mesh, a resume or this machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..config.environment import CHECK, export, read_setting, variable_of
from ..config.launch.options import spellings
from ..config.launch.parser import GIVEN, StoreMesh, verb_parser
from ..launch.arguments import add_launch_options, add_script
from ..program import program_name
from .launch import launch_and_exit

_DESCRIPTION = (
    "Run two optimizer steps of a script, look for mistakes on every rank, and list them with their lines; or check "
    f"something else of it. The options of {program_name()} launch say on which processes."
)
_OPTIONS_OF = {
    "mesh": ("steps", "json", "full_size", "seconds_per_run"),
    "resume": ("steps", "kill_at"),
    "machine": ("report",),
}
"""What is checked -> the options that belong to it."""


def check_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the verb, standalone or as a subcommand of `meshwright`."""
    parser = verb_parser(subparsers, "check", _DESCRIPTION)
    parser.usage = (
        f"{program_name()} check [--mesh [AXIS=N,...] | --resume | --machine]\n"
        "                        [options of launch] SCRIPT [ARGUMENTS]"
    )
    what = parser.add_argument_group("what is checked instead").add_mutually_exclusive_group()
    what.add_argument(
        "--mesh",
        action=StoreMesh,
        nargs="?",
        const="",
        default=False,
        metavar="AXIS=N,...",
        help="that the script computes the same on many processes as on one: losses, gradients, parameters; on the "
        "CPU. The mesh is dp=2,tp=2, or what the options of launch say",
    )
    what.add_argument("--resume", action="store_true", help="that a run which was killed and resumed goes on exactly")
    what.add_argument(
        "--machine", action="store_true", help=f"this machine, without a script: as {program_name()} test does"
    )
    more = parser.add_argument_group("options of the check")
    more.add_argument(
        "--steps", type=int, metavar="N", help="with --mesh: optimizer steps (2); with --resume: backward passes (20)"
    )
    more.add_argument("--json", metavar="FILE", help="with --mesh: write the result to this file, too")
    more.add_argument(
        *spellings("full_size"),
        action="store_true",
        default=None,
        help="with --mesh: keep models of transformers as they are; without it they get few layers and smaller widths",
    )
    more.add_argument(
        *spellings("seconds_per_run"),
        type=float,
        metavar="SECONDS",
        help="with --mesh: end a run that takes longer (300)",
    )
    more.add_argument(
        *spellings("kill_at"),
        type=int,
        metavar="N",
        help="with --resume: the backward pass after which it is killed (half)",
    )
    more.add_argument("--report", type=Path, metavar="FILE", help="with --machine: test everything, and write a report")
    add_launch_options(parser)
    add_script(parser, optional=True)
    parser.set_defaults(run=check_command)
    return parser


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    check_parser(verbs)


def check_command(args: argparse.Namespace) -> None:
    """Run the requested checks, and exit with the result."""
    what = next((name for name in _OPTIONS_OF if getattr(args, name)), "")
    _refuse_other_options(args, what)
    if what == "machine":
        from .test import test_command

        test_command(args)
    elif what == "mesh":
        from ..tools.verify.mesh import check_mesh

        check_mesh(args)
    elif what == "resume":
        from ..tools.verify.resume import check_resume

        check_resume(args)
    else:
        others = args.instruments or read_setting("instruments")
        export({variable_of("instruments"): f"{others},{CHECK}" if others else CHECK})
        setattr(args, GIVEN, getattr(args, GIVEN) - {"instruments"})  # the variable has them all
        launch_and_exit(args)


def _refuse_other_options(args: argparse.Namespace, what: str) -> None:
    """Refuse options that belong to another check, and a missing or superfluous script."""
    every = dict.fromkeys(name for names in _OPTIONS_OF.values() for name in names)
    for name in every:
        if getattr(args, name) is not None and name not in _OPTIONS_OF.get(what, ()):
            owners = " and ".join(f"--{other}" for other, names in _OPTIONS_OF.items() if name in names)
            _refuse(f"--{name} belongs to {owners}.")
    if what == "machine" and args.training_script is not None:
        _refuse(f"--machine checks this machine without a script: leave {args.training_script} out.")
    if what != "machine" and args.training_script is None:
        _refuse("SCRIPT is missing: which script is to be checked?")


def _refuse(sentence: str) -> None:
    import sys

    print(f"{program_name()} check: {sentence}", file=sys.stderr)
    raise SystemExit(2)
