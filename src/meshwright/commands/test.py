"""`meshwright test`: launch the self-test of this machine."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.launch.parser import verb_parser
from ..launch.arguments import LAUNCHER, add_launch_options, launch_flags
from ..program import program_name
from ..temporary import temporary_folder
from ..untrusted import parse_object
from .env import facts_as_text
from .launch import launch_command, launch_command_parser

if TYPE_CHECKING:
    from ..tools.selftest.report import Drill

_MODULE = "meshwright.tools.selftest.script"


def test_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the verb, standalone or as a subcommand of `meshwright`."""
    parser = verb_parser(subparsers, "test")
    parser.usage = f"{program_name()} test [--report FILE] [options of launch]"
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="test everything: meshes, FSDP2, offload, checkpoints, a straggler, a hang, speed beside torch alone; "
        "write a report that can be attached to an issue (Markdown)",
    )
    add_launch_options(parser)
    parser.set_defaults(run=test_command)
    return parser


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    test_command_parser(verbs)


def test_command(args: argparse.Namespace) -> None:
    """Launch the self-test with the settings that a script would get."""
    if args.report is not None:
        raise SystemExit(_report(args))
    # --quiet, because the report of the self-test names failures.
    launch_command(launch_command_parser().parse_args([*launch_flags(args), "--quiet", "-m", _MODULE]))


def _report(args: argparse.Namespace) -> int:
    """Run everything, write the report, and return the exit code."""
    from ..tools.selftest.report import as_markdown

    if not args.report.parent.is_dir():
        raise SystemExit(f"--report {args.report}: there is no folder {args.report.parent}. Create it first.")
    flags = launch_flags(args)
    with temporary_folder("test") as folder:
        file = folder / "outcomes.json"
        code = subprocess.run([*LAUNCHER, *flags, "--quiet", "-m", _MODULE, "--outcomes", str(file)]).returncode
        outcomes = parse_object(file.read_text(encoding="utf-8"), file.name) if file.exists() else None
    drill = None
    if outcomes is None and code == 0:
        print("The report is written where rank 0 runs.")
        return 0
    if outcomes is not None and outcomes["processes"] > 1 and not outcomes["num_not_run"]:
        drill = _hang_drill(flags, outcomes["processes"] - 1)
        print(f"{'✓' if drill.passed else '✗'} {'hang drill':<20}{drill.seconds * 1e3:>7.0f} ms  {drill.text}")
    args.report.write_text(as_markdown(facts_as_text(args.config_file), outcomes, drill), encoding="utf-8")
    print(
        f"\nThe report is in {args.report}. It names no host, address, user or folder; look at it before you attach it."
    )
    return code or int(drill is not None and not drill.passed)


def _hang_drill(flags: list[str], culprit: int) -> Drill:
    """Let the last rank make a call that the others do not make; the run must end, and name it."""
    from ..tools.selftest.hang import DRILL_SECONDS, SCRIPT, drill

    environment = os.environ | {"MESHWRIGHT_HANG_SECONDS": str(DRILL_SECONDS)}
    with temporary_folder("test") as folder:
        script = folder / "hang_drill.py"
        script.write_text(SCRIPT, encoding="utf-8")
        return drill([*LAUNCHER, *flags, str(script)], environment, culprit)


def main() -> None:
    """Run the verb as a program of its own."""
    test_command(test_command_parser().parse_args(sys.argv[1:]))
