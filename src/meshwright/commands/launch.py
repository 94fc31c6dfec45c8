"""`meshwright launch`: start a script on one process or many."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from ..config.launch.files import find_config
from ..config.launch.options import OPTIONS, USUAL
from ..config.launch.parser import explicit_options, verb_parser
from ..config.launch.settings import LaunchSettings
from ..errors import LaunchError
from ..launch.arguments import add_launch_options, add_script, options_after_the_script
from ..program import program_name

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
            from ..tools.clusters.ray.script import run_script

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
    from ..tools.clusters.job import ClusterJob, text_of
    from ..tools.clusters.kubernetes import documents
    from ..tools.clusters.skypilot import task

    job = ClusterJob.from_settings(settings, script)
    for remark in settings.without_effect():
        notify(remark)
    if settings.resolved["skypilot"].value:
        print(text_of([task(job)]), end="")
    else:
        print(text_of(documents(job, settings.resolved["kubernetes_kind"].value)), end="")


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
