"""`meshwright compare`: run the first steps of a script under accelerate 1.x and here, and show them side by side."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.launch.options import OPTIONS, spellings
from ..config.launch.parser import explicit_options, verb_parser
from ..errors import InvalidDataError
from ..launch.arguments import add_launch_options, add_script, launch_flags
from ..program import program_name
from ..temporary import temporary_folder

if TYPE_CHECKING:
    from ..tools.compare.records import ComparedRun
    from ..tools.compare.runs import Runner, Side
    from ..tools.compare.verdict import ComparisonVerdict

_DESCRIPTION = (
    "Run the first steps of a script under the installed accelerate 1.x and under this library, in turn, and show them "
    "side by side. The exit code is 0 if they are bitwise equal, 1 if not, 2 if they could not be compared."
)
EQUAL, DIFFERENT, UNKNOWN = 0, 1, 2
_ONLY_OURS = ("data_order",)
"""Options of a launch that 1.x does not have."""


def compare_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the verb, standalone or as a subcommand of `meshwright`."""
    parser = verb_parser(subparsers, "compare", _DESCRIPTION)
    parser.usage = f"{program_name()} compare [options] SCRIPT [SCRIPT'S ARGUMENTS]"
    parser.add_argument("--steps", type=_positive, default=10, metavar="N", help="optimizer steps; default: 10")
    parser.add_argument(
        "--processes", type=_numbers, default=(1,), metavar="N,N", help="numbers of processes, as 1,2; default: 1"
    )
    parser.add_argument(
        "--runs", type=_positive, default=2, metavar="N",
        help="runs under each; two or more also tell whether the script repeats itself; default: 2",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, metavar="N", help="seed for a script that sets none")
    parser.add_argument(
        "--reference", default=sys.executable, metavar="PYTHON", help="the interpreter that has accelerate 1.x"
    )
    parser.add_argument(
        *spellings("in_place"), action="store_true",
        help="run in this folder, instead of in temporary ones with links to all that is here",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=float, default=1800.0, metavar="SECONDS", help="the longest time of one run; default: 1800"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the comparison as JSON, too")
    add_launch_options(parser)
    add_script(parser)
    parser.set_defaults(run=compare_command)
    return parser


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    compare_command_parser(verbs)


def _positive(word: str) -> int:
    if int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word} is not a number from 1 on")
    return int(word)


def _numbers(words: str) -> tuple[int, ...]:
    return tuple(_positive(word) for word in words.split(","))


def compare_command(args: argparse.Namespace) -> None:
    """Compare, print the result, and exit with the code that says it."""
    from ..tools.compare.runs import CannotCompareError

    # The runs have sessions of their own: they end with this process only if it can end them.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        code = _compare(args)
    except (CannotCompareError, InvalidDataError, OSError) as error:
        print(f"{program_name()} compare: {error}", file=sys.stderr)
        code = UNKNOWN
    raise SystemExit(code)


def _compare(args: argparse.Namespace) -> int:
    from ..tools.compare.runs import Runner, our_side, published_side
    from ..tools.compare.text import page_of
    from ..tools.compare.verdict import judge

    flags = launch_flags(args)
    options = explicit_options(args, OPTIONS)
    _require_one_machine(options)
    theirs, interpreter = published_side(args.reference, _without_our_options(flags))
    ours = our_side(flags)
    names = theirs.name, ours.name
    verdicts: list[ComparisonVerdict] = []
    on_cpu, torch_version = _machine()
    script = args.training_script
    if not options.get("module"):
        if not Path(script).is_file():
            raise FileNotFoundError(f"{script} is not there.")
        script = str(Path(script).resolve())
    with temporary_folder("compare") as folder:
        runner = Runner(
            script=(script, *args.training_script_args),
            steps=args.steps,
            seed=args.seed,
            on_cpu=on_cpu or "--cpu" in flags,
            in_place=args.in_place,
            seconds=args.timeout,
            folder=folder,
        )
        for processes, runs in _all_runs(runner, (theirs, ours), args.processes, args.runs):
            _require_packages(runs, names)
            other_torch = interpreter.torch.partition("+")[0] != torch_version.partition("+")[0]
            verdict = judge(*runs, on_cpu=runner.on_cpu, other_torch=other_torch)
            verdicts.append(verdict)
            print(page_of(verdict, names), flush=True)
            if verdict.first is None and verdict.processes != processes:
                print(f"  {processes} processes were requested, and {verdict.processes} have recorded a step\n")
    code = max(map(_code, verdicts))
    if args.json is not None:
        args.json.write_text(json.dumps(_as_json(args, names, verdicts, code), indent=1) + "\n", encoding="utf-8")
    return code


def _all_runs(
    runner: Runner, sides: tuple[Side, Side], numbers: Sequence[int], repeats: int
) -> Iterator[tuple[int, tuple[list[ComparedRun], list[ComparedRun]]]]:
    """Run the sides in turn, the first one first in every second round; yield the runs of each number of processes."""
    from ..runtime.loop.progress import progress

    total = len(numbers) * repeats * len(sides) * runner.steps
    bar, shown, done = progress(range(total), f"{program_name()} compare"), 0, 0
    for processes in numbers:
        runs: tuple[list[ComparedRun], list[ComparedRun]] = ([], [])
        for repeat in range(repeats):
            for index in (0, 1) if repeat % 2 == 0 else (1, 0):
                before = done
                with closing(runner.run(sides[index], processes)) as states:
                    for state in states:
                        if not isinstance(state, int):
                            runs[index].append(state)
                        done = before + (state if isinstance(state, int) else runner.steps)
                        for _ in range(done - shown):
                            next(bar)
                        shown = done
        yield processes, runs
    with suppress(StopIteration):
        next(bar)


def _require_one_machine(options: dict[str, Any]) -> None:
    from ..tools.compare.runs import CannotCompareError

    if "num_processes" in options:
        raise CannotCompareError("--num_processes has no effect here. Give --processes 1,2: each is compared.")
    if int(options.get("num_machines") or 1) > 1:
        raise CannotCompareError("--num_machines: one machine is compared. Run it on one of them, without the option.")


def _without_our_options(flags: Sequence[str]) -> list[str]:
    kept = list(flags)
    for name in _ONLY_OURS:
        if f"--{name}" in kept:
            at = kept.index(f"--{name}")
            del kept[at : at + 2]
    return kept


def _machine() -> tuple[bool, str]:
    """Return whether there is no accelerator, and the version of torch."""
    import torch

    return not torch.accelerator.is_available(), torch.__version__


def _require_packages(runs: tuple[list[ComparedRun], list[ComparedRun]], names: tuple[str, str]) -> None:
    """Raise if a script has imported the other package: then nothing was compared."""
    from ..tools.compare.runs import CannotCompareError

    for side, name, is_ours in zip(runs, names, (False, True), strict=True):
        found = {rank.start.accelerate for run in side for rank in run.ranks} - {None}
        wrong = [version for version in found if version is not None and ("+meshwright" in version) != is_ours]
        if wrong:
            raise CannotCompareError(
                f"under {name}, the script has imported accelerate {wrong[0]}. Look for a change of sys.path in it, or "
                "for a package named accelerate beside it."
            )


def _code(verdict: ComparisonVerdict) -> int:
    if not verdict.is_known:
        return UNKNOWN
    return EQUAL if verdict.first is None else DIFFERENT


def _as_json(
    args: argparse.Namespace, names: tuple[str, str], verdicts: Sequence[ComparisonVerdict], code: int
) -> dict[str, Any]:
    compared = []
    for verdict in verdicts:
        values = asdict(verdict)
        values["causes"] = [{"why": c.why, "remedy": c.remedy, "row": c.row} for c in verdict.causes]
        compared.append(values | {"is_known": verdict.is_known})
    words = [args.training_script, *args.training_script_args]
    return {"script": words, "theirs": names[0], "ours": names[1], "exit_code": code, "processes": compared}
