"""Trace a program with all of its blocks and with five of them, and print the memory of both. A program of its own."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from meshwright.commands.plan import plan_parser
from meshwright.tools.plan.memory.expand import expanded
from meshwright.tools.plan.memory.peak import Memory, memory_of
from meshwright.tools.plan.plan import WantedTrace
from meshwright.tools.plan.traces import Traces


def main() -> None:
    """Print one line of JSON for each argument, which holds the arguments of the program."""
    program = str(Path(__file__).parents[1] / "program.py")
    for line in sys.argv[1:]:
        args = plan_parser().parse_args(["--gpus", "4xH100", program, *line.split()])
        with tempfile.TemporaryDirectory() as folder:
            traces = Traces(args, Path(folder), world_size=4, ranks_per_node=4, on_accelerators=True)
            whole, few = traces.get([WantedTrace(rank=0, blocks=None), WantedTrace(rank=0, blocks=(5, 5))])
        print(json.dumps([numbers(memory_of(whole)), numbers(memory_of(expanded(few, whole.blocks - few.blocks)))]))


def numbers(memory: Memory) -> dict[str, object]:
    """Return what is compared."""
    return {
        "peak": memory.peak.bytes,
        "phase": memory.peak.moment.phase,
        "most": memory.most,
        "reserved": memory.reserved,
        "expandable": memory.expandable,
        "blocks": memory.blocks,
    }


if __name__ == "__main__":
    main()
