"""`meshwright check --resume`: compare an uninterrupted run with one that was killed and resumed, step by step.

The loss, the learning rates, the position in the data and the random state of every step after the resume are compared.
The script's checkpoints go to a temporary folder.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ...launch.arguments import LAUNCHER, launch_flags
from ...program import program_name
from ...temporary import temporary_folder

_STEPS = 20


def check_resume(args: argparse.Namespace) -> None:
    """Run the script three times and report whether the resumed run equals the uninterrupted one."""
    steps = _STEPS if args.steps is None else args.steps
    kill_at = steps // 2 if args.kill_at is None else args.kill_at
    if not 0 < kill_at < steps:
        raise SystemExit(
            f"{program_name()} check --resume: --kill_at {kill_at} must lie between 0 and --steps {steps}."
        )
    words = [*launch_flags(args), args.training_script, *args.training_script_args]
    with temporary_folder("check") as folder:
        whole, resumed = folder / "whole", folder / "resumed"
        whole.mkdir()
        resumed.mkdir()
        _print(f"{steps} steps without interruption …")
        _run(words, whole, steps, None)
        _print(f"again, killed after step {kill_at} …")
        _run(words, resumed, steps, kill_at)
        _print("and started once more …")
        _run(words, resumed, steps, None)
        raise SystemExit(_compare(whole, resumed, steps, kill_at))


def _run(words: Sequence[str], folder: Path, last: int, kill_at: int | None) -> None:
    from ...checkpoint import trace
    from ...config.environment import TRACE_FOLDER, variable_of

    variables = {TRACE_FOLDER: str(folder), trace.LAST: str(last), variable_of("first_steps"): "off"}
    if kill_at is not None:
        variables[trace.KILL_AT] = str(kill_at)
    command = [*LAUNCHER, *words]
    ended = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    if (ended.returncode == 0) == (kill_at is not None):
        sys.stderr.write(ended.stdout[-2000:] + ended.stderr[-6000:])
        expected = "it should have been killed" if kill_at is not None else f"it failed with {ended.returncode}"
        raise SystemExit(f"{program_name()} check --resume: the script cannot be compared: {expected}.")


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
    print(f"{program_name()} check --resume: {message}", flush=True)
