"""Run the benchmarks and print one table: `python -m benchmarks [subject ...]`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from .chart import draw
from .contenders import VARIABLE
from .interleave import Comparison, share
from .results import Results
from .table import render
from .venvs import CONTENDERS, REPOSITORY, VENVS, interpreters

EVERYONE = tuple(CONTENDERS)
LIBRARIES = ("ours", "accelerate", "fabric")
ONE_INTERFACE = ("ours", "accelerate")
SUBJECTS = {
    "imports": EVERYONE,
    "launch": EVERYONE,
    "step": LIBRARIES,
    "ddp": EVERYONE,
    "fsdp": LIBRARIES,
    "gather": LIBRARIES,
    "loader": LIBRARIES,
    "checkpoint": LIBRARIES,
    "resume": LIBRARIES,
    "hang": LIBRARIES,
    "offload": ONE_INTERFACE,
    "offload_training": ("ours",),
    "compile": ONE_INTERFACE,
    "log": ("ours",),
    "muon": ("ours",),
    "meter": ("ours",),
    "deepspeed": ("ours",),
    "experts": ("ours",),
    "first_steps": ("ours",),
    "copies": ("ours",),
    "replicas": ("ours",),
    "sequences": ("ours",),
    "survive": ("ours",),
    "watch": ("ours",),
    "weights": ("ours",),
    "xla": ("ours",),
}
"""Who has what is measured."""
TURNS, ROUNDS_PER_TURN = 3, 50
"""How often the contenders take turns in a subject, at most, and how much they do at least when it is their turn."""
ONE_TURN = ("hang", "compile", "watch")
"""What takes so long that the contenders come once."""
MOST_SECONDS = 1800
"""How long a contender may take for its turn."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if ours missed a target beyond the noise."""
    options = parse(arguments)
    if options.read is not None:
        results = Results.read(options.read)
    elif options.here:
        results = measure(options.subjects, {"ours": Path(sys.executable)}, options.rounds, 1, options.json)
    else:
        pythons = interpreters(options.contenders, options.venvs)
        results = measure(options.subjects, pythons, options.rounds, TURNS, options.json)
    table = render(results)
    print(table)
    if options.table is not None:
        options.table.write_text(table + "\n")
    if options.charts is not None:
        options.charts.mkdir(parents=True, exist_ok=True)
        (options.charts / "benchmarks.svg").write_text(draw(results))
    return int(results.missed)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("subjects", nargs="*", metavar="subject", help=f"any of {', '.join(SUBJECTS)}; all if none")
    parser.add_argument("--rounds", type=int, default=300, help="rounds of eight laps per row (default: %(default)s)")
    parser.add_argument(
        "--contenders", nargs="+", choices=EVERYONE, default=EVERYONE, help="who is measured (default: everyone)"
    )
    parser.add_argument("--here", action="store_true", help="measure ours only, in this interpreter, without venvs")
    parser.add_argument("--venvs", type=Path, default=VENVS, metavar="DIR", help="where the contenders are installed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything as JSON")
    parser.add_argument("--read", type=Path, metavar="FILE", help="show what --json wrote, and measure nothing")
    parser.add_argument("--table", type=Path, metavar="FILE", help="also write the table")
    parser.add_argument("--charts", type=Path, metavar="DIR", help="draw benchmarks.svg there")
    options = parser.parse_args(arguments)
    unknown = set(options.subjects) - set(SUBJECTS)
    if unknown:
        parser.error(f"unknown subject {', '.join(sorted(unknown))}: choose from {', '.join(SUBJECTS)}")
    if options.rounds < 1:
        parser.error(f"--rounds must be 1 or more, not {options.rounds}")
    options.subjects = options.subjects or list(SUBJECTS)
    return options


def measure(
    subjects: Sequence[str],
    pythons: Mapping[str, Path],
    rounds: int,
    turns: int = TURNS,
    keep: Path | None = None,
) -> Results:
    """Let the contenders measure each subject in turn, a part of the rounds at a time: drift hits all of them.

    What is measured so far is kept in a file after every subject, if one is named.
    """
    results = Results()
    for subject in subjects:
        names = [name for name in SUBJECTS[subject] if name in pythons]
        parts = 1 if subject in ONE_TURN else max(1, min(turns, rounds // ROUNDS_PER_TURN))
        for part in range(parts):
            for name in names if part % 2 == 0 else reversed(names):
                if f"{name}, {subject}" not in results.failures:
                    _measure_part(results, name, pythons[name], subject, share(rounds, parts, part))
        if keep is not None:
            results.write(keep)
    return results


def _measure_part(results: Results, name: str, python: Path, subject: str, rounds: int) -> None:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        # No PYTHONPATH: it would show one contender what another one has.
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {VARIABLE: name}
        command = [str(python), "-m", "benchmarks.worker", subject, str(rounds), str(file)]
        try:
            ran = subprocess.run(
                command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS
            )
            said = "" if ran.returncode == 0 else ran.stderr or "it said nothing"
        except subprocess.TimeoutExpired:
            said = f"it had not finished after {MOST_SECONDS} s"
        if said and name == "ours":
            raise RuntimeError(f"the benchmark {subject} failed:\n{said}")
        if said:
            results.failures[f"{name}, {subject}"] = _last_line(said)
        else:
            answer = json.loads(file.read_text())
            results.versions[name] = answer["version"]
            for row in answer["rows"]:
                results.add(name, Comparison(**row))
    print(f"{subject}: {name}, {rounds} rounds, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def _last_line(text: str) -> str:
    return [line.strip() for line in text.splitlines() if line.strip()][-1]


if __name__ == "__main__":
    sys.exit(main())
