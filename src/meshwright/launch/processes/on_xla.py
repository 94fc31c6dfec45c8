"""Call a function of the script in a process for every XLA device: `meshwright launch --tpu --main_training_function`.

torch_xla starts the processes, because only it can tell them which devices are theirs.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from meshwright.runtime.devices import xla

from ...program import program_name


def main() -> None:
    """Run `on_xla.py FUNCTION NUM_PROCESSES [-m] SCRIPT ARGUMENT...`; 0 processes for any number."""
    function, expected, *words = sys.argv[1:]
    xla.launch(call, (function, int(expected), words))


def call(index: int, function: str, expected: int, words: Sequence[str]) -> None:
    """Import the script, as a module that is not `__main__`, and call its function."""
    started = xla.world_size()
    if expected not in (0, started):
        _refuse(
            f"num_processes is {expected}, and torch_xla has started {started} on {xla.kind_of_hardware()}: one for "
            f"every device. Leave num_processes out, or say {started}."
        )
    as_module = words[0] == "-m"
    script, *arguments = words[as_module:]
    sys.argv = [script, *arguments]
    if as_module:
        found = runpy.run_module(script, run_name=script)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(script))
        found = runpy.run_path(script, run_name=Path(script).stem)
    if not callable(found.get(function)):
        _refuse(
            f"{script} has no function {function}, which main_training_function names. Name another one, or leave it "
            "out: the script then runs as it is, in one process."
        )
    found[function]()


def _refuse(reason: str) -> None:
    print(f"{program_name()} launch: {reason}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
