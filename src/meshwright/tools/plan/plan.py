"""Plan a run from traces of some of its ranks: `plan_run`.

[Note: few blocks] Tracing takes a second per block and micro-batch. A deep model is therefore traced twice, with few of
its repeated blocks and with some more. Communication and time grow with every block by the same amount, so two points
give the line on which the whole model lies. Memory is computed from the larger trace, expanded to all blocks:
[Note: blocks in between].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from ...runtime.devices.catalogue import Catalogue, DeviceCluster
from .ledger import LedgerRow, extrapolated_ledger, ledger_of, timed
from .memory.depth import extrapolated
from .memory.expand import expanded
from .memory.fit import Fit, fit_of, libraries_of
from .memory.levers import MemoryOption, extrapolated_peaks, lever_peaks, levers_of
from .memory.peak import Memory, memory_of
from .memory.visits import CannotExpandError
from .result import Plan, RankPlan, RunCost
from .timing.depth import extrapolated as extrapolated_timing
from .timing.passes import with_another_pass
from .timing.pipelines import time_pipeline
from .timing.rates import Rates, loaders_of, rates
from .timing.step import Timing, time_step
from .trace import Trace

FEW, MORE = (3, 2), (5, 3)
"""Repeated blocks of the two traces of a deep model, and of each stage if it is a pipeline."""
_ALL_STAGES = 4
"""The longest pipeline whose stages are all traced; in a longer one the second stands for those in the middle."""


@dataclass(frozen=True, kw_only=True)
class WantedTrace:
    """One trace that is wanted: a rank, and how many repeated blocks of the model, and of a pipeline's stage."""

    rank: int
    blocks: tuple[int, int] | None
    """None for all of them."""


Tracer = Callable[[Sequence[WantedTrace]], list[Trace]]


def plan_run(
    tracer: Tracer,
    script: str,
    cluster: DeviceCluster | None,
    name: str = "",
    catalogue: Catalogue | None = None,
    *,
    brief: bool = False,
) -> Plan:
    """Trace the ranks that differ, and compute what the run takes on a cluster, or on no devices in particular.

    A brief plan lets rank 0 stand for all of a stage, and looks for no levers.
    """
    depths = _traced(tracer, brief)
    trace = depths[0].larger
    ranks = [_rank_plan(depth, cluster) for depth in depths]
    plan = Plan(
        script=script,
        cluster=name,
        world_size=trace.world_size,
        axes=trace.axes,
        parameters=trace.parameters,
        trained_parameters=trace.trained_parameters,
        ranks=ranks,
        blocks=trace.blocks,
        all_blocks=trace.all_blocks,
        schedule=trace.schedule,
        microbatches=trace.all_microbatches,
        guesses=list(dict.fromkeys(guess for depth in depths for guess in depth.larger.guesses)),
    )
    loaders = loaders_of(trace)
    plan.samples, plan.tokens = (count * loaders for count in trace.batches_of_step)
    if not brief:
        plan.levers = depths[ranks.index(plan.largest)].levers(plan.largest.memory)
    if cluster is not None:
        plan.fits = _fits(plan, cluster, catalogue)
        plan.rates, plan.bubble = _rates(plan, depths, cluster)
    return plan


def cost_of(plan: Plan, *, steps: int | None, tokens: int | None, price: float | None) -> RunCost | None:
    """Return what a run of so many steps, or of so many tokens, takes."""
    if plan.rates is None or (steps is None and tokens is None):
        return None
    if steps is None:
        assert tokens is not None
        if not plan.tokens:
            raise ValueError("the script's batches have no tokens to count: give --steps instead of --tokens.")
        steps = ceil(tokens / plan.tokens)
    hours, low, high = (seconds * steps / 3600 for seconds in (plan.rates.seconds, plan.rates.low, plan.rates.high))
    return RunCost(steps, tokens or steps * plan.tokens, hours, low, high, plan.world_size, price)


@dataclass(frozen=True)
class Depths:
    """The traces of one rank: with fewer and with more blocks; both are the same if it has few."""

    smaller: Trace
    larger: Trace

    @property
    def factor(self) -> float:
        """Where the whole model is on the line from the smaller trace (0) to the larger (1)."""
        if self.smaller is self.larger:
            return 1.0
        stages = self.larger.stages
        whole = ceil(self.larger.all_blocks / stages) * stages
        return (whole - self.smaller.blocks) / (self.larger.blocks - self.smaller.blocks)

    @cached_property
    def whole(self) -> Trace | None:
        """The trace of all blocks, for memory only; None if it cannot be made from few of them."""
        if self.smaller is self.larger:
            return self.larger
        few, more = (trace.blocks // trace.stages for trace in (self.smaller, self.larger))
        try:
            return expanded(
                self.larger,
                round((self.factor - 1) * (more - few)),
                period=max(1, more // MORE[self.larger.stages > 1]),
            )
        except CannotExpandError:
            return None

    def memory(self) -> Memory:
        """Return the memory of the whole model."""
        if self.whole is not None:
            return memory_of(self.whole)
        smaller, larger = memory_of(self.smaller), memory_of(self.larger)
        return extrapolated(smaller, larger, round(smaller.blocks + self.factor * (larger.blocks - smaller.blocks)))

    def levers(self, memory: Memory) -> list[MemoryOption]:
        """Return what would save memory."""
        if self.whole is not None:
            return levers_of(self.whole, memory, lever_peaks(self.whole))
        peaks = extrapolated_peaks(lever_peaks(self.smaller), lever_peaks(self.larger), self.factor)
        return levers_of(self.larger, memory, peaks)

    def timing(self, cluster: DeviceCluster) -> Timing:
        """Return the time of a step of this rank."""
        larger = _time_passes(self.larger, cluster)
        if self.smaller is self.larger:
            return larger
        return extrapolated_timing(_time_passes(self.smaller, cluster), larger, self.factor)


def _traced(tracer: Tracer, brief: bool) -> list[Depths]:
    """Trace rank 0, which tells how many blocks there are and which other ranks differ, and then the others."""
    [trace] = tracer([WantedTrace(rank=0, blocks=MORE)])
    sizes = [MORE] if trace.blocks == trace.all_blocks else [FEW, MORE]
    ranks = [0] if brief and trace.axes.get("pp", 1) == 1 else [0, *_other_ranks(trace)]
    traces = iter(tracer([WantedTrace(rank=rank, blocks=size) for rank in ranks for size in sizes]))
    found = [[next(traces) for _ in sizes] for _ in ranks]
    return [Depths(traces_of_rank[0], traces_of_rank[-1]) for traces_of_rank in found]


def _rank_plan(depths: Depths, cluster: DeviceCluster | None) -> RankPlan:
    trace = depths.larger
    ledger = extrapolated_ledger(_ledger_of_passes(depths.smaller), _ledger_of_passes(trace), depths.factor)
    timing = None
    if cluster is not None:
        timing = depths.timing(cluster)
        ledger = timed(ledger, timing.communication, timing.exposed)
    return RankPlan(trace.rank, trace.stage, depths.memory(), ledger, timing)


def _time_passes(trace: Trace, cluster: DeviceCluster) -> Timing:
    """Time a step of a trace, with the passes that were not traced."""
    timing = time_step(trace, cluster)
    if not trace.untraced_passes:
        return timing
    return extrapolated_timing(timing, time_step(with_another_pass(trace), cluster), trace.untraced_passes)


def _ledger_of_passes(trace: Trace) -> list[LedgerRow]:
    rows = ledger_of(trace)
    if not trace.untraced_passes:
        return rows
    return extrapolated_ledger(rows, ledger_of(with_another_pass(trace)), trace.untraced_passes)


def _other_ranks(trace: Trace) -> list[int]:
    """Return the ranks that are traced besides rank 0: one of every stage, or the last."""
    stages = trace.axes.get("pp", 1)
    if stages == 1:
        return [trace.world_size - 1] if trace.world_size > 1 else []
    after = list(trace.axes)[list(trace.axes).index("pp") + 1 :]
    stride = prod(trace.axes[axis] for axis in after)
    chosen = range(1, stages) if stages <= _ALL_STAGES else (1, stages - 1)
    return [stage * stride for stage in chosen]


def _fits(plan: Plan, cluster: DeviceCluster, catalogue: Catalogue | None) -> list[Fit]:
    """Compare the largest rank with the cluster's devices, and with all others that are known."""
    largest = plan.largest
    groups = len({row.axis for row in largest.ledger})
    others = [] if catalogue is None else [d for d in catalogue.devices.values() if d.name != cluster.device.name]
    return [
        fit_of(
            largest.memory,
            device.name,
            device.memory + device.context,
            libraries_of(device.context, groups),
            largest.rank,
        )
        for device in (cluster.device, *sorted(others, key=lambda device: device.memory))
    ]


def _rates(plan: Plan, depths: list[Depths], cluster: DeviceCluster) -> tuple[Rates, float]:
    """Return the speed of a step, and the part of it that a pipeline waits."""
    trace = depths[0].larger
    timings = [rank.timing for rank in plan.ranks if rank.timing is not None]
    ranks = trace.axes.get("pp", 1)
    if ranks == 1:
        return rates(max(timings, key=lambda timing: timing.seconds), trace, cluster), 0.0
    middle = timings[1:2] * (ranks - len(timings))  # a rank that was not traced works as the second does
    pipeline = time_pipeline([timings[0], *middle, *timings[1:]], trace)
    return rates(pipeline.mean, trace, cluster, pipeline.seconds), pipeline.replay.bubble
