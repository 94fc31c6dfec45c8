"""`meshwright plan`: tell what a training run takes, without running it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..config.launch.options import spellings
from ..config.launch.parser import verb_parser
from ..errors import LaunchError
from ..launch.arguments import add_launch_options, add_script, checked_settings, options_after_the_script
from ..program import program_name
from ..temporary import temporary_folder

if TYPE_CHECKING:
    from ..runtime.devices.catalogue import Catalogue, DeviceCluster
    from ..tools.plan.result import Plan

FITS_NOT, NOT_PLANNED = 1, 2
"""Exit codes: the run does not fit on the devices; nothing could be planned."""
_GIB = 1 << 30
_OWN = ("gpus", "device_memory", "devices_file", "steps", "tokens", "price", "search", "search_limit", "search_files")
"""Options that are noticed where they stand behind the script."""


def plan_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the verb, standalone or as a subcommand of `meshwright`."""
    parser = verb_parser(
        subparsers,
        "plan",
        "Run the first two steps of a script on fake tensors, without devices, as ranks of a world of any size. Say "
        "how much memory each rank needs, what is communicated, and how long a step takes.",
    )
    parser.usage = f"{program_name()} plan --gpus 8xH100 [options] SCRIPT [ARGUMENTS]"
    devices = parser.add_argument_group("where it would run")
    devices.add_argument(
        *spellings("gpus"), metavar="NxKIND", help="devices, such as 64xH100, or 2x8xA100-80GB: 2 nodes with 8 each"
    )
    devices.add_argument(
        *spellings("device_memory"), type=float, metavar="GIB", help="memory of a device, if not as the kind has it"
    )
    devices.add_argument(*spellings("devices_file"), metavar="FILE", help="YAML file that describes other devices")
    length = parser.add_argument_group("how long it would run")
    length.add_argument(*spellings("steps"), type=int, metavar="N", help="optimizer steps of the whole run")
    length.add_argument(*spellings("tokens"), type=_count, metavar="N", help="or its tokens, such as 15T or 2e9")
    length.add_argument(*spellings("price"), type=float, metavar="P", help="price of one device for one hour")
    search = parser.add_argument_group("how it could run")
    search.add_argument(
        "--search",
        action="store_true",
        help="try other meshes, batch sizes and settings at the same global batch; what you give as a flag is kept",
    )
    search.add_argument(
        *spellings("search_limit"), type=int, default=24, metavar="N", help="ways that are traced (default: 24)"
    )
    search.add_argument(
        *spellings("search_files"),
        metavar="FOLDER",
        help="write configuration files of the three best ways to this folder",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="print the plan as JSON instead of the text, or write it to this file",
    )
    output.add_argument("--html", metavar="FILE", help="write a page with pictures to this file")
    output.add_argument(
        *spellings("seconds_per_run"),
        type=float,
        default=600.0,
        metavar="S",
        help="end a trace that takes longer (default: 600)",
    )
    add_launch_options(parser)
    add_script(parser)
    parser.set_defaults(run=plan_command)
    return parser


def _count(word: str) -> int:
    """Read a number with a letter for thousands, millions, billions or trillions."""
    powers = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
    power = powers.get(word[-1:].lower())
    return int(float(word) if power is None else float(word[:-1]) * power)


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    plan_parser(verbs)


def plan_command(args: argparse.Namespace) -> None:
    """Plan the script, print the plan, and exit with whether it fits."""
    for remark in options_after_the_script(args, _OWN):
        print(f"{program_name()} plan: {remark}", file=sys.stderr)
    if not (args.module or args.no_python or Path(args.training_script).exists()):
        print(f"{program_name()} plan: there is no script {args.training_script} in {Path.cwd()}.", file=sys.stderr)
        raise SystemExit(NOT_PLANNED)
    for variable, value in (("OMP_NUM_THREADS", "1"), ("TOKENIZERS_PARALLELISM", "false")):
        os.environ.setdefault(variable, value)  # before torch is imported: threads do not survive a fork
    from ..tools.plan.memory.fit import FULL
    from ..tools.plan.report.data import as_json
    from ..tools.plan.report.page import as_page
    from ..tools.plan.report.text import as_text

    try:
        plan = _plan(args)
    except (ValueError, OSError, LaunchError) as error:
        print(f"{program_name()} plan: {error}", file=sys.stderr)
        raise SystemExit(NOT_PLANNED) from error
    if args.html:
        Path(args.html).write_text(as_page(plan, __version__), encoding="utf-8")
    if args.json and args.json != "-":
        Path(args.json).write_text(as_json(plan) + "\n", encoding="utf-8")
    print(as_json(plan) if args.json == "-" else as_text(plan))
    raise SystemExit(FITS_NOT if plan.fits and plan.fits[0].verdict == FULL else 0)


def _plan(args: argparse.Namespace) -> Plan:
    from ..tools.plan.plan import cost_of, plan_run
    from ..tools.plan.proposals import Proposals
    from ..tools.plan.traces import Traces

    began = time.monotonic()
    checked_settings(args)
    cluster, catalogue = _cluster(args)
    if args.search and cluster is None:
        raise ValueError("--search compares times and memory on devices: give --gpus.")
    with temporary_folder("plan") as folder:
        make_traces = partial(
            Traces,
            args,
            world_size=cluster.size if cluster is not None else args.num_processes or 1,
            ranks_per_node=cluster.node.devices if cluster is not None else 8,
            on_accelerators=cluster is not None and cluster.device.name != "cpu",
        )
        traces = make_traces(folder)
        plan = plan_run(traces.get, args.training_script, cluster, args.gpus or "", catalogue)
        if args.search:
            assert cluster is not None
            plan.candidates = Proposals(args, cluster, folder, make_traces).find(plan, traces)
            _write_files(args.search_files, plan)
    plan.cost = cost_of(plan, steps=args.steps, tokens=args.tokens, price=args.price)
    plan.planned_in = time.monotonic() - began
    return plan


def _write_files(folder: str | None, plan: Plan) -> None:
    """Write the configuration files of the best candidates."""
    from ..tools.plan.searching.search import BEST

    if folder is None:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    best = [candidate for candidate in plan.candidates if candidate.fits and candidate.yaml][:BEST]
    for number, candidate in enumerate(best, 1):
        Path(folder, f"{number}.yaml").write_text(candidate.yaml, encoding="utf-8")


def _cluster(args: argparse.Namespace) -> tuple[DeviceCluster | None, Catalogue | None]:
    """Return the devices that the user named, and all that are known; None and None on the CPU of this machine."""
    from ..runtime.devices.catalogue import DEVICES, load

    if args.gpus is None:
        if not args.cpu:
            raise ValueError("on which devices? Give --gpus, such as --gpus 8xH100, or --cpu with --num_processes.")
        return None, None
    if args.num_processes is not None:
        raise ValueError("--gpus says how many processes there are: leave --num_processes out.")
    catalogue = load(Path(args.devices_file) if args.devices_file else DEVICES)
    found = catalogue.cluster(args.gpus)
    if args.device_memory is not None:
        found = found.with_memory(int(args.device_memory * _GIB))
    return found, catalogue
