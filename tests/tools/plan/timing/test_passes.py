"""A step of many passes, from a trace of two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.runtime.devices.catalogue import cluster
from meshwright.tools.plan.ledger import ledger_of
from meshwright.tools.plan.timing.passes import with_another_pass
from meshwright.tools.plan.timing.step import time_step
from meshwright.tools.plan.trace import BACKWARD, FORWARD, UPDATE, Trace, TracedStep
from tests.launching import run_script
from tests.tools.plan.made import MIB, Maker

BOTH_WAYS = """
import json, sys, tempfile
from pathlib import Path

from meshwright.tools.plan.plan import MORE, plan_run
from meshwright.tools.plan.searching.choices import Choice, choice_of
from meshwright.runtime.devices.catalogue import cluster
from meshwright.commands.plan import plan_parser
from meshwright.tools.plan.traces import Traces

found = []
for passes, choice in (("4", None), ("1", Choice(dp_shard=2, batch=4, accumulation=4))):
    words = ["--gpus", "2xcpu", "--use_fsdp", "--fsdp_version", "2", sys.argv[1], "--layers", "2", "--steps", "4"]
    args = plan_parser().parse_args([*words, "--batch_size", "4", "--accumulation", passes])
    traces = Traces(
        args, Path(tempfile.mkdtemp()), world_size=2, ranks_per_node=2, on_accelerators=False, choice=choice
    )
    once = {}
    def tracer(parts):  # both depths of a model with two blocks are the same
        part = parts[-1]
        once[part.rank] = once.get(part.rank) or traces.get([part])[0]
        return [once[part.rank]] * len(parts)
    plan = plan_run(tracer, "", cluster("2xcpu"), brief=True)
    trace = once[0]
    found.append({
        "passes": trace.steps[-1].passes, "accumulation": choice_of(trace).accumulation, "samples": plan.samples,
        "seconds": plan.rates.seconds, "memory": plan.largest.memory.total,
        "sent": {row.collective: row.sent for row in plan.ranks[0].ledger},
    })
print(json.dumps(found))
"""


def two_passes(count: int = 2) -> Trace:
    """Return a trace whose passes compute twice each, and whose last one reduces gradients."""
    made = Maker(axes={"dp_replicate": 4}, world_size=4)
    for _ in range(2):
        began = made.tick + 1
        for number in range(count):
            made.at(FORWARD).compute()
            made.communicate("all_gather", "dp_shard", 4, MIB)
            made.at(BACKWARD).compute()
            if number == count - 1:
                made.communicate("all_reduce", "dp_replicate", 4, 8 * MIB)
        made.at(UPDATE).compute("aten._fused_adamw_", 0)
        made.trace.steps.append(TracedStep(began, made.tick + 1, samples=8, tokens=64, passes=count))
        made.tick += 1
    return made.trace


def test_another_pass_is_what_a_trace_with_one_more_has() -> None:
    longer, traced = with_another_pass(two_passes()), two_passes(3)
    devices = cluster("4xH100")
    assert longer.steps[-1].passes == 3
    assert time_step(longer, devices).seconds == pytest.approx(time_step(traced, devices).seconds)
    assert ledger_of(longer) == ledger_of(traced)


def test_samples_of_untraced_passes_count() -> None:
    trace = two_passes()
    trace.all_passes = 8
    assert trace.untraced_passes == 6
    assert trace.batches_of_step == (32, 256)


def test_a_script_of_four_passes_is_planned_from_two(tmp_path: Path) -> None:
    script = tmp_path / "both.py"
    script.write_text(BOTH_WAYS)
    program = Path(__file__).parents[1] / "program.py"
    whole, short = json.loads(run_script(script, program, world_size=1, directory=tmp_path).splitlines()[-1])
    assert (whole.pop("passes"), short.pop("passes")) == (4, 2)
    assert whole["accumulation"] == short["accumulation"] == 4
    assert whole["samples"] == short["samples"] == 32
    assert short["memory"] == pytest.approx(whole["memory"], rel=0.005)
    assert short["sent"] == pytest.approx(whole["sent"])
    assert short["seconds"] == pytest.approx(whole["seconds"], rel=0.02)  # the first pass adds no gradients
