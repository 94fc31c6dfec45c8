"""Importing the library, in terms of importing torch, in fresh interpreters.

Every interpreter does both and reads its own clock of CPU time, so what other processes and the disk do cancels out.

torch leaves so many objects behind that Python's next full garbage collection (65 ms here) is due 2,000 objects later,
whoever makes them. It is done before the library's turn, and counts on neither side.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

from .interleave import Comparison, summary

ROUNDS_PER_INTERPRETER = 25

_SCRIPT = """
import gc, json, sys, time
begin = time.process_time()
import torch
seconds_of_torch = time.process_time() - begin
gc.collect()
before = set(sys.modules)
begin = time.process_time()
from accelerate import Accelerator
seconds = seconds_of_torch + time.process_time() - begin
packages = {name.partition(".")[0] for name in set(sys.modules) - before}
packages -= {name.partition(".")[0] for name in before} | set(sys.stdlib_module_names)
print(json.dumps([seconds_of_torch, seconds, sorted(packages)]))
"""


def run(rounds: int) -> list[Comparison]:
    """Measure the import; note which packages it brings that torch alone does not."""
    _import_in_a_fresh_interpreter()  # compiles what has not been compiled
    measured = [_import_in_a_fresh_interpreter() for _ in range(2 + rounds // ROUNDS_PER_INTERPRETER)]
    row = summary("from accelerate import Accelerator", [(bare, ours) for bare, ours, _ in measured], target=1.03)
    return [replace(row, notes=[f"packages that `import torch` does not bring: {', '.join(measured[0][2])}"])]


def _import_in_a_fresh_interpreter() -> tuple[float, float, list[str]]:
    # Compiled files are written and found, as those of an installed package are.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    answer = subprocess.run(
        [sys.executable, "-c", _SCRIPT], env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    bare, ours, packages = json.loads(answer.splitlines()[-1])
    return bare, ours, packages
