"""`accelerate verify-resume`: compare an uninterrupted run with one that was killed and resumed, step by step."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...config.launch.options import spellings
from ...config.launch.parser import verb_parser
from ..launch import LAUNCHER, add_launch_options, add_script, launch_flags

_DESCRIPTION = (
    "Run a script for some steps. Run it again, kill it in the middle and restart it. Compare the loss, the "
    "learning rates, the position in the data and the random state of every step after the resume. The script must "
    "call save_state and, at its start, resume (or load_state). Its checkpoints go to a temporary folder."
)


def verify_resume_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the verb, standalone or as a subcommand of `accelerate`."""
    parser = verb_parser(subparsers, "verify-resume", _DESCRIPTION)
    parser.usage = (
        "accelerate verify-resume [--steps N] [--kill_at K] [options of accelerate launch] SCRIPT [ARGUMENTS]"
    )
    parser.add_argument("--steps", type=int, default=20, help="backward passes to compare (default: 20)")
    parser.add_argument(
        *spellings("kill_at"),
        type=int,
        default=None,
        help="backward pass after which the script is killed (default: half)",
    )
    add_launch_options(parser)
    add_script(parser)
    parser.set_defaults(run=verify_resume_command)
    return parser


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    verify_resume_parser(verbs)


def verify_resume_command(args: argparse.Namespace) -> None:
    """Run the script three times and report whether the resumed run equals the uninterrupted one."""
    kill_at = args.steps // 2 if args.kill_at is None else args.kill_at
    if not 0 < kill_at < args.steps:
        raise SystemExit(f"accelerate verify-resume: --kill_at {kill_at} must lie between 0 and --steps {args.steps}.")
    words = [*launch_flags(args), args.training_script, *args.training_script_args]
    with tempfile.TemporaryDirectory(prefix="accelerate_verify_") as folder:
        whole, resumed = Path(folder) / "whole", Path(folder) / "resumed"
        whole.mkdir()
        resumed.mkdir()
        _print(f"{args.steps} steps without interruption …")
        _run(words, whole, args.steps, None)
        _print(f"again, killed after step {kill_at} …")
        _run(words, resumed, args.steps, kill_at)
        _print("and started once more …")
        _run(words, resumed, args.steps, None)
        raise SystemExit(_compare(whole, resumed, args.steps, kill_at))


def _run(words: Sequence[str], folder: Path, last: int, kill_at: int | None) -> None:
    from ...checkpoint import trace
    from ...config.environment import TRACE_FOLDER

    variables = {TRACE_FOLDER: str(folder), trace.LAST: str(last)}
    if kill_at is not None:
        variables[trace.KILL_AT] = str(kill_at)
    command = [*LAUNCHER, *words]
    ended = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    if (ended.returncode == 0) == (kill_at is not None):
        sys.stderr.write(ended.stdout[-2000:] + ended.stderr[-6000:])
        expected = "it should have been killed" if kill_at is not None else f"it failed with {ended.returncode}"
        raise SystemExit(f"accelerate verify-resume: the script cannot be compared: {expected}.")


def _compare(whole: Path, resumed: Path, steps: int, kill_at: int) -> int:
    from ...checkpoint.trace import first_difference

    ranks = sorted(int(file.stem.removeprefix("rank_")) for file in whole.glob("rank_*.jsonl"))
    if not ranks:
        _print("no backward pass was seen: does the script call accelerator.backward?")
        return 2
    marks = [resumed / f"rank_{rank}.resumed" for rank in ranks]
    if not all(mark.is_file() for mark in marks):
        _print(f"the second start did not load a checkpoint. Was one saved before step {kill_at}, and does the script "
               "call accelerator.resume() or load_state?")  # fmt: skip
        return 2
    after = min(int(mark.read_text(encoding="utf-8")) for mark in marks)
    differences = [found for rank in ranks if (found := first_difference(whole, resumed, rank, after)) is not None]
    if not differences:
        _print(f"exact: steps {after + 1} to {steps} after the resume are bit for bit those of the uninterrupted run, "
               f"on {len(ranks)} process(es).")  # fmt: skip
        return 0
    first = min(differences, key=lambda difference: difference.step)
    _print(f"NOT the same: killed after step {kill_at}, resumed from step {after}; at step {first.step} on rank "
           f"{first.rank} these differ: {', '.join(first.fields)}.")  # fmt: skip
    return 1


def _print(message: str) -> None:
    print(f"accelerate verify-resume: {message}", flush=True)
