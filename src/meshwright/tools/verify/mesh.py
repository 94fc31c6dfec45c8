"""`meshwright check --mesh`: compare the first steps of a script on a mesh with those of one process."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from ...errors import LaunchError
from ...program import program_name

UNEQUAL, NOT_COMPARED = 1, 2
"""Exit codes: a difference was found; nothing could be compared."""


def check_mesh(args: argparse.Namespace) -> None:
    """Run the script on the mesh and on one process, compare, and exit with the result."""
    for variable, value in (("OMP_NUM_THREADS", "1"), ("TOKENIZERS_PARALLELISM", "false")):
        os.environ.setdefault(variable, value)  # before torch is imported: threads do not survive a fork
    from ...temporary import temporary_folder
    from .comparing.comparison import compare
    from .comparing.panel import panel
    from .runs import RanksDisagreeError, VerifyRuns

    started = time.monotonic()
    try:
        with temporary_folder("check") as folder:
            runs = VerifyRuns(args, folder)
            mesh = runs.on_mesh()
            result = compare(mesh, *runs.alone(mesh))
    except RanksDisagreeError as error:
        result = error.result
    except (ValueError, OSError, LaunchError) as error:
        print(f"{program_name()} check --mesh: {error}", file=sys.stderr)
        raise SystemExit(NOT_COMPARED) from error
    if args.json:
        Path(args.json).write_text(json.dumps(result.to_dict(), indent=2) + "\n", encoding="utf-8")
    print(panel(result, time.monotonic() - started))
    raise SystemExit(0 if result.equal else UNEQUAL)
