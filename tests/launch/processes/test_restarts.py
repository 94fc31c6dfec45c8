"""`--max_restarts`: the processes of the next attempt find each other, and nothing of those before."""

from __future__ import annotations

from pathlib import Path

from tests.launching import run_accelerate

FAILS_ONCE = """
import os, sys, time
import torch
from meshwright import Accelerator

first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if not first and os.environ["RANK"] == "0":
    time.sleep(1)  # so that rank 1 looks for it before it is there
accelerator = Accelerator(cpu=True)
accelerator.wait_for_everyone()
if first and accelerator.process_index == 1:
    sys.exit(3)
print("sum", accelerator.reduce(torch.ones(1)).item())
"""


def test_the_processes_of_the_next_attempt_find_each_other(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILS_ONCE)
    words = ("launch", "--cpu", "--num_processes", 2, "--max_restarts", 1, script)
    launched = run_accelerate(*words, directory=tmp_path)
    assert launched.code == 0, launched.complaints
    assert launched.printed == "sum 2.0\nsum 2.0\n"
