"""The command line of a launch, which other verbs take too."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Container, Sequence
from typing import Any

from ..config.launch.files import find_config
from ..config.launch.options import MACHINES, OPTIONS, RESOURCES, as_flags, spellings
from ..config.launch.parser import add_options, explicit_options
from ..config.launch.settings import LaunchSettings
from ..errors import InvalidDataError
from ..program import program_name
from ..untrusted import read_bytes
from .console import notify

LAUNCHER = (sys.executable, "-m", "meshwright", "launch")
"""The words that start a launch in a process of its own."""


def add_launch_options(parser: argparse.ArgumentParser, *, listed: Container[str] = ()) -> None:
    """Add all options of a launch, for verbs that launch; the help of other verbs leaves them to that of `launch`."""
    if not listed:
        parser.epilog = f"The options of a launch are taken, too: see {program_name()} launch --help."
    parser.add_argument(
        *spellings("config_file"), help="read settings from this YAML file instead of the default one", metavar="FILE"
    )
    add_options(parser, OPTIONS, listed=listed)


def add_script(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add the script and its arguments, which end the command line."""
    number = "?" if optional else None
    parser.add_argument("training_script", nargs=number, metavar="SCRIPT", help="the script, or the module with -m")
    arguments = parser.add_argument(
        "training_script_args",
        nargs=argparse.REMAINDER,
        metavar="ARGUMENTS",
        help="the script's own arguments",
    )
    arguments.required = False  # argparse would name them beside a missing script


def launch_flags(args: argparse.Namespace) -> list[str]:
    """Return the launch flags that were given to another verb."""
    file = [] if args.config_file is None else ["--config_file", args.config_file]
    return file + as_flags(explicit_options(args, OPTIONS))


def checked_settings(args: argparse.Namespace, **fixed: Any) -> LaunchSettings:
    """Return the settings of the launch that another verb speaks of; refuse a flag that this launch would not read."""
    settings = LaunchSettings.resolve(explicit_options(args, OPTIONS) | fixed, find_config(args.config_file))
    for remark in settings.refuse_flags_without_effect():
        notify(remark)
    return settings


def options_after_the_script(args: argparse.Namespace, others: Sequence[str] = ()) -> list[str]:
    """Return a message for every option after the script that the script does not seem to read.

    These are options of a launch, and `others` of another verb, by name.
    """
    script = args.training_script
    flags = _flags_that_are_noticed(others)
    given = [word.partition("=")[0] for word in args.training_script_args]
    found = [flag for flag in given if flag.startswith("--") and flag in flags]
    if not found:
        return []
    try:
        source = read_bytes(script, "the script").decode("utf-8", "replace")
    except (OSError, InvalidDataError):  # a module, a program or a pipe: its options are not known
        return []
    if any(word in source for word in _READS_MANY_OPTIONS):
        return []
    purpose = "for the plan" if others else "for the launch"
    return [
        f"{flag} comes after {script}, so it is passed to the script. To use it {purpose}, put it before {script}."
        for flag in found
        if flags[flag] not in source
    ]


def _flags_that_are_noticed(others: Sequence[str]) -> dict[str, str]:
    flags = {flag: option.name for option in OPTIONS if option.group in (RESOURCES, MACHINES) for flag in option.flags}
    return flags | {flag: name for name in others for flag in spellings(name)}


_READS_MANY_OPTIONS = ("HfArgumentParser", "TrainingArguments", "TrlParser", "parse_known_args")
"""Words of scripts whose options are defined elsewhere."""
