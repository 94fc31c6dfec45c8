"""Plan `train.py` from few of its blocks and from all of them, and print both plans. A program of its own.

python -m tests.tools.plan.depths.compare "llama --layers 9" "t5 --layers 9 --sharded"
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.commands.plan import plan_parser
from meshwright.runtime.devices.catalogue import load
from meshwright.tools.plan.plan import WantedTrace, plan_run
from meshwright.tools.plan.result import Plan
from meshwright.tools.plan.trace import Trace
from meshwright.tools.plan.traces import Traces

RANKS = 2


def main() -> None:
    """Print one line of JSON for each argument, which holds the arguments of the script."""
    script, cluster = Path(__file__).with_name("train.py"), load().cluster(f"{RANKS}xH100")
    for line in sys.argv[1:]:
        args = plan_parser().parse_args(["--gpus", f"{RANKS}xH100", str(script), *line.split()])
        with tempfile.TemporaryDirectory() as folder:
            traces = Traces(args, Path(folder), world_size=RANKS, ranks_per_node=RANKS, on_accelerators=True)

            def all_blocks(parts: Sequence[WantedTrace], traces: Traces = traces) -> list[Trace]:
                return traces.get([replace(part, blocks=None) for part in parts])

            plans = [plan_run(tracer, script.name, cluster, brief=True) for tracer in (traces.get, all_blocks)]
        print(json.dumps([numbers(plan) for plan in plans]))


def numbers(plan: Plan) -> dict[str, Any]:
    """Return what is compared."""
    ranks = []
    for rank in plan.ranks:
        assert rank.timing is not None
        ranks.append(
            {
                "peak": rank.memory.peak.bytes,
                "phase": rank.memory.peak.moment.phase,
                "flops": {**rank.timing.forward_flops, "backward": sum(rank.timing.backward_flops.values())},
                "sent": {f"{row.collective} {row.axis}": row.sent for row in rank.ledger},
                "calls": {f"{row.collective} {row.axis}": row.calls for row in rank.ledger},
            }
        )
    return {"blocks": plan.blocks, "all_blocks": plan.all_blocks, "ranks": ranks}


if __name__ == "__main__":
    main()
