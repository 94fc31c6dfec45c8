"""Verify many scripts in one process that has torch imported, and read what came out."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests import warm

_ROOT = Path(__file__).parents[3]


def verify_all(
    jobs: list[tuple[str, list[str]]], *, python: str = sys.executable, seconds: float = 900
) -> list[dict[str, Any]]:
    """Return the result of each job: the name of its runs on one process, which jobs may share, and its words."""
    lines = "".join(json.dumps(job) + "\n" for job in jobs)
    ended = warm.run(
        [python, "-m", "tests.tools.verify.sweep"],
        input=lines,
        capture_output=True,
        text=True,
        timeout=seconds,
        cwd=_ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    results = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(results) == len(jobs), ended.stderr[-6000:]
    for result in results:
        result["complaints"] = ended.stderr[-6000:]
    return results
