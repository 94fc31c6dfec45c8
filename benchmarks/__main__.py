"""Run the benchmarks and print one table: `python -m benchmarks [subject ...]`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from .interleave import Comparison
from .table import render

SUBJECTS = ("step", "ddp", "fsdp", "gather", "loader", "imports", "launch", "checkpoint", "log", "compile", "offload",
            "deepspeed")  # fmt: skip
REPOSITORY = Path(__file__).parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if a target was missed beyond the noise."""
    options = parse(arguments)
    rows = measure(options.subjects, options.rounds)
    if options.json is not None:
        options.json.write_text(json.dumps([{**asdict(row), "verdict": row.verdict} for row in rows], indent=2) + "\n")
    reference = None
    if options.reference is not None:
        reference = measure_reference(options.reference, options.subjects, options.rounds)
    print(render(rows, reference))
    return int(any(row.verdict == "missed" for row in rows))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("subjects", nargs="*", metavar="subject", help=f"any of {', '.join(SUBJECTS)}; all if none")
    parser.add_argument("--rounds", type=int, default=300, help="rounds of eight laps per row (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    parser.add_argument(
        "--reference", metavar="PYTHON", help="an interpreter with another accelerate: adds a column with its ratios"
    )
    options = parser.parse_args(arguments)
    unknown = set(options.subjects) - set(SUBJECTS)
    if unknown:
        parser.error(f"unknown subject {', '.join(sorted(unknown))}: choose from {', '.join(SUBJECTS)}")
    if options.rounds < 1:
        parser.error(f"--rounds must be 1 or more, not {options.rounds}")
    options.subjects = options.subjects or list(SUBJECTS)
    return options


def measure(subjects: Sequence[str], rounds: int) -> list[Comparison]:
    rows: list[Comparison] = []
    for subject in subjects:
        rows += import_module(f"{__package__}.{subject}").run(rounds)
    return rows


def measure_reference(python: str, subjects: Sequence[str], rounds: int) -> dict[str, float]:
    """Let another interpreter run these files with the accelerate it has; return its ratios by row."""
    with tempfile.TemporaryDirectory() as directory:
        results = Path(directory) / "reference.json"
        command = [python, "-m", __package__, *subjects, "--rounds", str(rounds), "--json", str(results)]
        subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL)  # 1: its targets are not ours
        return {row["what"]: row["ratio"] for row in json.loads(results.read_text())}


if __name__ == "__main__":
    sys.exit(main())
