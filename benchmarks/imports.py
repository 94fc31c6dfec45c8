"""Importing a library and making its first object, in terms of importing torch, in fresh interpreters.

Every interpreter does both and reads its own clock of CPU time, so what other processes and the disk do cancels out.

torch leaves so many objects behind that Python's next full garbage collection (65 ms here) is due 2,000 objects later,
whoever makes them. It is done before the library's turn, and counts on neither side.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from .contenders import current
from .interleave import Comparison

ROUNDS_PER_INTERPRETER = 25

_SCRIPT = """
import gc, json, sys, time
begin = time.process_time()
import torch
torch_only = time.process_time() - begin
gc.collect()
before = set(sys.modules)
begin = time.process_time()
{IMPORT}
imported = torch_only + time.process_time() - begin
packages = {{name.partition(".")[0] for name in set(sys.modules) - before}}
packages -= {{name.partition(".")[0] for name in before}} | set(sys.stdlib_module_names)
{CONSTRUCT}
constructed = torch_only + time.process_time() - begin
print(json.dumps([torch_only, imported, constructed, sorted(packages)]))
"""


def run(rounds: int) -> list[Comparison]:
    """Measure the import; note which packages it brings that torch alone does not."""
    library = current()
    script = _SCRIPT.format(IMPORT=library.IMPORT, CONSTRUCT=library.CONSTRUCT or "")
    _in_a_fresh_interpreter(script)  # compiles what has not been compiled
    measured = [_in_a_fresh_interpreter(script) for _ in range(2 + rounds // ROUNDS_PER_INTERPRETER)]
    packages = f"packages that `import torch` does not bring: {', '.join(measured[0][3])}"
    rows = [Comparison("import the library / import torch", [(row[0], row[1]) for row in measured], 1.03, [packages])]
    if library.CONSTRUCT is not None:
        constructed = [(row[0], row[2]) for row in measured]
        rows.append(Comparison("import the library, make its first object / import torch", constructed))
    return rows


def _in_a_fresh_interpreter(script: str) -> tuple[float, float, float, list[str]]:
    # Compiled files are written and found, as those of an installed package are.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", script]
    answer = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    torch_only, imported, constructed, packages = json.loads(answer.splitlines()[-1])
    return torch_only, imported, constructed, packages
