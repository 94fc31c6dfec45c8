"""A `gather` that only rank 0 calls: from the beginning of the script to the end of the command that launched it twice.

The backend's timeout is 90 s here, where its default is 30 minutes; bare PyTorch has nothing else to end the wait. Both
sides wait at the same time: waiting costs nothing.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

from .contenders import bare, current
from .interleave import Comparison
from .venvs import REPOSITORY

TIMEOUT_SECONDS = 90
SECONDS_TO_START = 60
SCRIPT = """import sys
sys.path.insert(0, {repository!r})
from benchmarks import hang
hang.gather_alone({who!r}, {seconds}, __file__)
"""


def run(rounds: int) -> list[Comparison]:
    """Measure one hang: it takes as long whenever it happens."""
    with ThreadPoolExecutor(2) as pool:
        by_hand, through_the_library = pool.map(_seconds, ("bare", "library"))
    what = f"a gather on rank 0 only, until it ends / a timeout of {TIMEOUT_SECONDS} s"
    return [Comparison(what, [(by_hand, through_the_library)], target=0.5)]


def _seconds(who: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT.format(repository=str(REPOSITORY), who=who, seconds=TIMEOUT_SECONDS))
        command = (bare if who == "bare" else current()).launch(script, 2, Path(folder))
        limit = TIMEOUT_SECONDS + SECONDS_TO_START
        ended = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=limit)
        if ended.returncode == 0:
            raise RuntimeError("the wait ended without an error")
        return time.time() - script.stat().st_mtime


def gather_alone(who: str, seconds: int, script: str) -> None:
    """Note the time at the script, and hang, in one of the processes that were launched."""
    side = bare if who == "bare" else current()
    Path(script).touch()
    side.gather_alone(timedelta(seconds=seconds))
