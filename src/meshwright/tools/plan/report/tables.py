"""The tables of a plan, as words: the text and the page show the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..memory.fit import EXPANDABLE, FITS, FULL
from ..result import Candidate, Plan, RankPlan
from ..trace import OWNERS
from .numbers import amount, duration, mesh, module_name, share, size

_NEAR = 3
"""Kinds of devices with a little less and a little more than enough memory that are shown at first."""
CANNOT_KNOW = (
    "Workspaces that kernels take inside of one operation (cuBLAS, cuDNN, attention of other libraries).",
    "The order in which streams really run, which changes what the allocator can reuse. It is simulated for the order "
    "in which the work is issued.",
    "Memory of the driver and of NCCL: constants, not measured for your machines.",
    "Kernels that are slower than their roofline, host code between them, and data loading.",
    "Networks that are shared, and topologies inside of a cluster.",
    "Shapes that depend on the values of tensors; the places where a value was guessed are listed.",
)


@dataclass
class Table:
    """Rows of words below a head."""

    head: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    words: int = 1
    """Columns on the left that hold words; the others hold numbers."""
    wide: tuple[int, ...] = ()
    """Further columns that hold words."""
    marks: dict[int, str] = field(default_factory=dict)
    """Row -> `good`, `bad` or `total`."""


def memory_table(plan: Plan) -> Table:
    """Return the peak of each traced rank by owner."""
    ranks = plan.ranks
    table = Table(("at the peak", *(_rank_name(plan, rank) for rank in ranks)))
    for owner in OWNERS:
        if any(rank.memory.peak.bytes.get(owner) for rank in ranks):
            table.rows.append((owner, *(size(rank.memory.peak.bytes.get(owner, 0.0)) for rank in ranks)))
    table.marks[len(table.rows)] = "total"
    table.rows.append(("allocated", *(size(rank.memory.total) for rank in ranks)))
    table.rows.append(("held by the allocator", *(size(rank.memory.reserved) for rank in ranks)))
    table.rows.append(("  with expandable_segments", *(size(rank.memory.expandable) for rank in ranks)))
    if plan.fits:
        table.rows.append(("driver and libraries", *(size(plan.fits[0].libraries) for _ in ranks)))
    table.rows.append(("before the first step", *(size(rank.memory.setup) for rank in ranks)))
    return table


def moment_of(rank: RankPlan) -> str:
    """Return when and where a rank has its peak."""
    moment = rank.memory.peak.moment
    name = module_name(moment.module)
    place = f", in {name}" if name else ""
    operation = f" ({moment.operation})" if moment.operation else ""
    return f"step {moment.step + 1}, {moment.phase}{place}{operation}"


def largest_table(rank: RankPlan) -> Table:
    """Return what holds the most memory at the peak."""
    total = rank.memory.total
    table = Table(("module", "as", "allocations", "memory", "of the peak"), words=2)
    for item in rank.memory.peak.largest[:10]:
        table.rows.append(
            (
                module_name(item.module) or "(outside)",
                item.owner,
                amount(item.count),
                size(item.bytes),
                share(item.bytes, total),
            )
        )
    return table


def fit_table(plan: Plan, near: bool = False) -> Table:
    """Return on which devices the largest rank fits: on all, or on the run's own and those with about enough memory."""
    table = Table(("device", "verdict", "memory", "needed", "margin"), words=2)
    shown = plan.fits[:1] + sorted(plan.fits[1:], key=lambda fit: fit.capacity)
    if near:
        enough = [fit for fit in shown[1:] if fit.verdict in (FITS, EXPANDABLE)]
        less = [fit for fit in shown[1:] if fit.verdict not in (FITS, EXPANDABLE)]
        shown = [*shown[:1], *less[-_NEAR:], *enough[:_NEAR]]
    for fit in shown:
        table.marks[len(table.rows)] = kind_of(fit.verdict)
        table.rows.append(
            (fit.device, fit.verdict, size(fit.capacity), size(fit.needed + fit.libraries), _signed(fit.margin))
        )
    return table


def kind_of(verdict: str) -> str:
    """Return whether a verdict is good news."""
    return {FITS: "good", EXPANDABLE: "good", FULL: "bad"}.get(verdict, "warn")


def lever_table(plan: Plan, prices: bool = False) -> Table:
    """Return what would save memory, and what it costs if there is room."""
    if not plan.levers:
        return Table(("change",), [("No setting that the plan knows saves 1 % of the peak or more.",)])
    if prices:
        rows = [(lever.name, size(lever.saves), lever.setting, lever.price) for lever in plan.levers]
        return Table(("change", "saves", "by", "costs"), [*rows], wide=(2, 3))
    return Table(("change", "saves", "by"), [(e.name, size(e.saves), e.setting) for e in plan.levers], wide=(2,))


def ledger_table(rank: RankPlan) -> Table:
    """Return what a rank communicates in a step."""
    timed = any(row.seconds is not None for row in rank.ledger)
    head = ("collective", "axis", "ranks", "calls", "size", "sent by a rank")
    table = Table((*head, "time", "hidden") if timed else head, words=2)
    for row in rank.ledger:
        cells = (row.collective, row.axis, amount(row.group), amount(row.calls), size(row.size), size(row.sent))
        if timed:
            hidden = share(row.hidden or 0.0, row.seconds or 0.0)
            cells = (*cells, duration(row.seconds or 0.0), hidden)  # type: ignore[assignment]
        table.rows.append(cells)
    return table


def time_table(rank: RankPlan) -> Table:
    """Return where the seconds of a step go."""
    timing = rank.timing
    table = Table(("part of the step", "time", "of the step"))
    if timing is None:
        return table
    parts = [
        *((f"{phase} pass" if phase != "update" else phase, seconds) for phase, seconds in timing.phases.items()),
        *((f"computing: {kind}", seconds) for kind, seconds in timing.kinds.items()),
        *((f"bound by {bound}", seconds) for bound, seconds in timing.bounds.items()),
        ("communication that nothing hides", sum(timing.exposed.values())),
    ]
    table.rows = [(name, duration(seconds), share(seconds, timing.seconds)) for name, seconds in parts if seconds]
    return table


def search_table(candidates: Sequence[Candidate]) -> Table:
    """Return what a search found."""
    table = Table(("mesh", "micro-batch", "memory", "step", "tokens/s", "MFU", "verdict"))
    several = any(candidate.accumulation > 1 for candidate in candidates)
    for candidate in candidates:
        rates = candidate.rates
        table.marks[len(table.rows)] = "good" if candidate.fits else "bad"
        table.rows.append(
            (
                ", ".join([mesh(candidate.axes), *candidate.labels]),
                amount(candidate.micro_batch) + (f" x {candidate.accumulation:>2}" if several else ""),
                size(candidate.reserved),
                duration(rates.seconds) if rates else "-",
                amount(rates.tokens_per_second) if rates else "-",
                f"{100 * rates.mfu:.0f} %" if rates else "-",
                FITS if candidate.fits else FULL,
            )
        )
    return table


def facts(plan: Plan) -> list[tuple[str, str]]:
    """Return what is planned, in one line each."""
    trained = "" if plan.trained_parameters == plan.parameters else f", {amount(plan.trained_parameters)} trained"
    traced = f"; {plan.blocks} of {plan.all_blocks} repeated blocks traced" if plan.blocks < plan.all_blocks else ""
    found = [
        ("script", plan.script),
        ("devices", plan.cluster),
        ("model", f"{amount(plan.parameters)} parameters{trained}{traced}"),
        ("mesh", f"{mesh(plan.axes)} ({plan.world_size:,} process{'es' * (plan.world_size != 1)})"),
    ]
    if plan.schedule:
        bubble = f", {100 * plan.bubble:.0f} % of the step waiting" if plan.bubble else ""
        found.append(("pipeline", f"{plan.schedule}, {plan.microbatches} micro-batches{bubble}"))
    if plan.samples:
        tokens = f", {amount(plan.tokens)} tokens" if plan.tokens else ""
        found.append(("batch", f"{plan.samples:,} samples{tokens} per step, of all processes"))
    return found


def summary(plan: Plan) -> list[tuple[str, str]]:
    """Return the answers, in one line each."""
    largest = plan.largest
    memory = largest.memory
    found = [
        ("memory", f"{size(memory.total)} at the peak of rank {largest.rank}: {moment_of(largest)}"),
        ("allocator", f"holds {size(memory.reserved)}, with expandable_segments {size(memory.expandable)}"),
    ]
    if plan.fits:
        fit = plan.fits[0]
        margin = f"{size(abs(fit.margin))} {'remain' if fit.margin >= 0 else 'lack'} of {size(fit.capacity)}"
        found.append((fit.device, f"{fit.verdict}: {margin}, with {size(fit.libraries)} for driver and libraries"))
    if plan.rates is not None:
        rates = plan.rates
        found.append(("step", f"{duration(rates.seconds)} ({duration(rates.low)} to {duration(rates.high)})"))
        if rates.tokens_per_second:
            each = amount(rates.tokens_per_second_and_device)
            found.append(("speed", f"{amount(rates.tokens_per_second)} tokens/s, {each} per device"))
        else:
            found.append(("speed", f"{rates.samples_per_second:,.1f} samples/s"))
        found.append(("utilisation", f"{100 * rates.mfu:.1f} % of the devices' FLOPs are the model's"))
    return found + _cost(plan)


def _cost(plan: Plan) -> list[tuple[str, str]]:
    cost = plan.cost
    if cost is None:
        return []
    tokens = f" ({amount(cost.tokens)} tokens)" if cost.tokens else ""
    money = f", {cost.money:,.0f} at {cost.price:g} per device and hour" if cost.money is not None else ""
    hours = f"{cost.hours:,.1f} h ({cost.low:,.1f} to {cost.high:,.1f}), {cost.device_hours:,.0f} device-hours"
    return [("cost", f"{cost.steps:,} steps{tokens}: {hours}{money}")]


def _rank_name(plan: Plan, rank: RankPlan) -> str:
    stages = len({each.stage for each in plan.ranks}) > 1
    return f"rank {rank.rank}" + (f", stage {rank.stage}" if stages else "")


def _signed(count: float) -> str:
    return f"-{size(-count)}" if count < 0 else f"+{size(count)}"
