"""A plan made from small traces, with everything that a report can show."""

from __future__ import annotations

from meshwright.tools.plan.ledger import ledger_of, timed
from meshwright.tools.plan.memory.fit import fit_of, libraries_of
from meshwright.tools.plan.memory.levers import lever_peaks, levers_of
from meshwright.tools.plan.memory.peak import memory_of
from meshwright.tools.plan.result import Candidate, Plan, RankPlan, RunCost
from meshwright.tools.plan.timing.rates import Rates
from meshwright.tools.plan.timing.step import Timing
from tests.tools.plan.made import MIB, model

RATES = Rates(1.25, 1.0, 1.5, 51.2, 419_430.4, 6_553.6, 0.41)
KEY = "all_gather dp_shard"


def planned(blocks: int = 12, scale: int = 100, guesses: tuple[str, ...] = ("train.py:31 loss.item()",)) -> Plan:
    trace = model(blocks, head=40 * MIB, sharded=True)
    for allocation in trace.allocations:
        allocation.size *= scale
    memory = memory_of(trace)
    timing = Timing(
        1.25,
        phases={"forward": 0.4, "backward": 0.8, "update": 0.05},
        kinds={"matmul": 0.9, "attention": 0.2},
        bounds={"flops": 0.8, "bandwidth": 0.3},
        communication={KEY: 0.3},
        exposed={KEY: 0.06},
    )
    rank = RankPlan(0, 0, memory, timed(ledger_of(trace), timing.communication, timing.exposed), timing)
    libraries = libraries_of(600 * MIB, groups=2)
    devices = {"H100-SXM": 79.1, "A100-40GB": 39.4, "H200": 139.8, "B200": 178.0, "L4": 22.0}
    return Plan(
        script="train.py",
        cluster="64xH100",
        world_size=64,
        axes={"dp_shard": 64},
        parameters=8_030_261_248,
        trained_parameters=8_030_261_248,
        ranks=[rank],
        blocks=3,
        all_blocks=blocks,
        samples=64,
        tokens=524_288,
        fits=[fit_of(memory, name, total * 2**30, libraries) for name, total in devices.items()],
        levers=levers_of(trace, memory, lever_peaks(trace)),
        rates=RATES,
        cost=RunCost(steps=1000, tokens=524_288_000, hours=0.35, low=0.28, high=0.42, devices=64, price=2.5),
        candidates=[
            Candidate(
                {"dp_shard": 64}, 1, {}, 40e9, 44e9, True, RATES, "meshwright launch --use_fsdp train.py", "a: b\n"
            ),
            Candidate({"dp_shard": 32, "tp": 2}, 2, {}, 90e9, 99e9, False),
        ],
        guesses=list(guesses),
        planned_in=12.0,
    )
