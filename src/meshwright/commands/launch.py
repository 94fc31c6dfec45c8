"""`meshwright launch`: start a script on one process or many."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from ..config.launch.files import find_config
from ..config.launch.options import MACHINES, OPTIONS, RESOURCES, USUAL, as_flags, spellings
from ..config.launch.parser import add_options, explicit_options, verb_parser
from ..config.launch.settings import LaunchSettings
from ..errors import LaunchError
from ..program import program_name

LAUNCHER = (sys.executable, "-m", "meshwright", "launch")
"""The words that start a launch in a process of its own."""
_DESCRIPTION = "Start a script on one process or many. The script's own arguments follow it."


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the verb, standalone or as a subcommand of `meshwright`."""
    parser = verb_parser(subparsers, "launch", _DESCRIPTION)
    parser.usage = f"{program_name()} launch [options] SCRIPT [SCRIPT'S ARGUMENTS]"
    parser.epilog = (
        f"These are the options that most launches need. {program_name()} launch --help-all shows all of them, with "
        "those of FSDP, parallelism, DeepSpeed, Megatron-LM, fp8, torch.compile, Ray and Kubernetes."
    )
    add_launch_options(parser, listed=USUAL)
    add_script(parser)
    parser.set_defaults(run=launch_command)
    return parser


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
    from ..launch.console import notify

    settings = LaunchSettings.resolve(explicit_options(args, OPTIONS) | fixed, find_config(args.config_file))
    for remark in settings.refuse_flags_without_effect():
        notify(remark)
    return settings


def launch_command(args: argparse.Namespace) -> None:
    """Launch from a parsed command line; raise SystemExit with the culprit's exit code on failure."""
    _launch(args, replace_process=False)


def _launch(args: argparse.Namespace, *, replace_process: bool) -> None:
    from ..launch.console import notify
    from ..launch.machines.cluster import find_cluster
    from ..launch.machines.hostfile import cluster_from_hostfile, remarks_on_machines
    from ..launch.machines.pods import find_pod
    from ..launch.plan import make_plan
    from ..launch.processes.run import run_plan

    try:
        config = find_config(getattr(args, "config_file", None))
        settings = LaunchSettings.resolve(explicit_options(args, OPTIONS), config)
        if any(settings.resolved[name].value for name in ("kubernetes", "skypilot", "dry_run")):
            _print_manifest(settings, (args.training_script, *args.training_script_args))
            return
        cluster = find_cluster() or cluster_from_hostfile(settings) or find_pod(settings)
        plan = make_plan(settings, (args.training_script, *args.training_script_args), cluster)
        remarks = [*(config.unknown if config is not None else ()), *settings.without_effect(), *plan.notes]
        remarks += remarks_on_machines(settings)
        remarks += options_after_the_script(args)
        if settings.explain:
            from ..launch.explain import explain

            print(explain(settings, plan, config, remarks))
            return
        settings.refuse_missing_engines(config)
        if config is not None and config.misspelt and not settings.lenient:
            raise ValueError(f"{' '.join(config.misspelt)} Correct the file, or pass --lenient to continue without it.")
        for remark in remarks:
            notify(remark)
        if plan.method == "ray":
            from ..launch.ray.script import run_script

            code = run_script(settings, plan)
        else:
            code = run_plan(settings, plan, replace_process=replace_process)
    except (ValueError, OSError, LaunchError) as error:
        notify(str(error))
        raise SystemExit(2) from error
    if code != 0:
        raise SystemExit(code)


def _print_manifest(settings: LaunchSettings, script: Sequence[str]) -> None:
    from ..launch.console import notify
    from ..launch.machines.manifests.job import Job, text_of
    from ..launch.machines.manifests.kubernetes import documents
    from ..launch.machines.manifests.skypilot import task

    job = Job.from_settings(settings, script)
    for remark in settings.without_effect():
        notify(remark)
    if settings.resolved["skypilot"].value:
        print(text_of([task(job)]), end="")
    else:
        print(text_of(documents(job, settings.resolved["kubernetes_kind"].value)), end="")


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
        source = Path(script).read_text(encoding="utf-8", errors="replace")
    except OSError:  # a module or a program: its options are not known
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


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    launch_command_parser(verbs).set_defaults(run=launch_and_exit)


def launch_and_exit(args: argparse.Namespace) -> None:
    """Launch, and exit without the finalisation of torch, which takes a tenth of a second."""
    code: Any = 0
    try:
        _launch(args, replace_process=True)
    except SystemExit as ending:
        code = ending.code
    except KeyboardInterrupt:  # before a process was started
        code = 128 + signal.SIGINT
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Run the verb as a program of its own."""
    _launch(launch_command_parser().parse_args(sys.argv[1:]), replace_process=True)


if __name__ == "__main__":
    main()
