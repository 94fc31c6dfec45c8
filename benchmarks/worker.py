"""Measure one subject in this interpreter: `python -m benchmarks.worker SUBJECT ROUNDS FILE` writes rows as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from .contenders import current


def main(subject: str, rounds: str, file: str) -> None:
    """Write the rows, and which version was measured."""
    rows = import_module(f"{__package__}.{subject}").run(int(rounds))
    answer = {"version": version(current().DISTRIBUTION), "rows": [asdict(row) for row in rows]}
    Path(file).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
