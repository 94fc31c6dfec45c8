"""The hang drill of `meshwright test --report`: a launch that must end by itself, with a verdict."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence

from .report import Drill

DRILL_SECONDS = 5
"""How long ranks wait before they compare where they are."""
TIME_LIMIT = 120.0
SCRIPT = """
import torch
from meshwright import Accelerator

accelerator = Accelerator()
mine = torch.ones(4, device=accelerator.device)
accelerator.gather(mine).tolist()
if accelerator.process_index == accelerator.num_processes - 1:
    accelerator.gather(mine).tolist()  # the drill: the last rank alone makes this call
accelerator.reduce(mine).tolist()
accelerator.wait_for_everyone()
"""
"""A script of a user, because the verdict names lines of scripts, not of this package."""


def drill(command: Sequence[str], environment: Mapping[str, str], culprit: int) -> Drill:
    """Launch the script, and tell whether the run ended with the rank and the line."""
    start = time.perf_counter()
    try:
        ran = subprocess.run(
            command, env=environment, text=True, timeout=TIME_LIMIT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except subprocess.TimeoutExpired as error:
        printed = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else ""
        return Drill(False, TIME_LIMIT, f"the run had not ended after {TIME_LIMIT:.0f} s", printed)
    seconds = time.perf_counter() - start
    if ran.returncode == 0:
        return Drill(False, seconds, "the run ended as if nothing had happened", ran.stdout)
    if f"rank {culprit} only (hang_drill.py:" not in ran.stdout:
        return Drill(False, seconds, f"the run ended, but its verdict does not name rank {culprit}", ran.stdout)
    return Drill(True, seconds, f"rank {culprit} made a call alone, and was named after {seconds:.0f} s", ran.stdout)
