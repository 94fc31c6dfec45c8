"""Say where the runs of two packages differ, and what each of them took."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from .causes import Case, Cause, Difference, causes_of
from .records import ComparedRun, RankRecord


@dataclass(frozen=True)
class Quartiles:
    """Several measures of one thing: the median, and a quarter of them below and above."""

    low: float
    median: float
    high: float


@dataclass(frozen=True)
class PackageTotals:
    """What is the same for all steps of one package."""

    steps: int
    samples: int
    schedulers: list[int]
    parameters: str
    files: list[str]
    peak_memory: int
    peak_device_memory: int
    seconds: Quartiles
    """Of a step, the first of each run left out."""


@dataclass(frozen=True)
class ComparisonVerdict:
    """The comparison on one number of processes."""

    processes: int
    theirs: PackageTotals
    ours: PackageTotals
    losses: list[tuple[float, float]]
    gradient_norms: list[tuple[float, float]]
    first: Difference | None
    itself: Difference | None
    """Where two runs under 1.x differ from each other."""
    largest: float | None
    """The largest difference of a parameter at the end; None if it was not measured."""
    causes: list[Cause]

    @property
    def is_known(self) -> bool:
        """Tell whether the question has an answer: runs that differ from each other earlier say nothing."""
        return self.itself is None or (self.first is not None and self.first.step < self.itself.step)


def judge(
    theirs: Sequence[ComparedRun], ours: Sequence[ComparedRun], *, on_cpu: bool, other_torch: bool
) -> ComparisonVerdict:
    """Compare the runs of two packages on the same number of processes."""
    first = first_difference(theirs[0], ours[0])
    repeats = [(theirs[0], run) for run in theirs[1:]] + [(ours[0], run) for run in ours[1:]]
    found = [difference for pair in repeats if (difference := first_difference(*pair)) is not None]
    itself = min(found, key=lambda difference: difference.step, default=None)
    processes = ours[0].ranks[0].start.processes
    causes: list[Cause] = []
    if first is not None:
        rank = min(first.rank, len(theirs[0].ranks) - 1, len(ours[0].ranks) - 1)
        steps = [run.ranks[rank].steps for run in (theirs[0], ours[0])]
        at = max(0, min(first.step, len(steps[0]), len(steps[1])) - 1)
        unsteady = itself is not None and itself.step <= first.step
        causes = causes_of(Case(first, steps[0][at], steps[1][at], processes, on_cpu, other_torch, unsteady))
    pairs = list(zip(theirs[0].ranks[0].steps, ours[0].ranks[0].steps, strict=False))
    return ComparisonVerdict(
        processes=processes,
        theirs=_totals(theirs),
        ours=_totals(ours),
        losses=[(a.loss, b.loss) for a, b in pairs],
        gradient_norms=[(float(a.gradient_norm), float(b.gradient_norm)) for a, b in pairs],
        first=first,
        itself=itself,
        largest=_largest_difference(theirs[0], ours[0]),
        causes=causes,
    )


def first_difference(theirs: ComparedRun, ours: ComparedRun) -> Difference | None:
    """Return the first step at which two runs are not bitwise equal, and in what."""
    if len(theirs.ranks) != len(ours.ranks):
        return Difference(0, "processes", 0, str(len(theirs.ranks)), str(len(ours.ranks)))
    found = [_of_rank(a, b) for a, b in zip(theirs.ranks, ours.ranks, strict=True)]
    differences = [difference for difference in found if difference is not None]
    return min(differences, key=lambda difference: difference.step, default=None)


def _of_rank(theirs: RankRecord, ours: RankRecord) -> Difference | None:
    rank = theirs.start.rank
    read: tuple[_Batches, _Batches] = (defaultdict(list), defaultdict(list))
    for step, (a, b) in enumerate(zip(theirs.steps, ours.steps, strict=False), start=1):
        for batches, record in zip(read, (a, b), strict=True):
            for iterator, samples, checksum in record.batches:
                batches[iterator].append((samples, checksum))
        if other := _other_batch(*read):
            return Difference(step, "samples", rank, *other)
        quantities = (
            ("backward passes", len(a.losses), len(b.losses)),
            ("loss", a.losses, b.losses),
            ("gradient norm", a.gradient_norm, b.gradient_norm),
            ("learning rate", a.learning_rates, b.learning_rates),
            ("parameters", a.parameters, b.parameters),
        )
        for what, x, y in quantities:
            if x != y:
                return Difference(step, what, rank, _words(x), _words(y))
    counts = len(theirs.steps), len(ours.steps)
    if counts[0] != counts[1]:
        return Difference(min(counts) + 1, "steps", rank, str(counts[0]), str(counts[1]))
    return None


_Batches = defaultdict[int, list[tuple[int, int]]]


def _other_batch(theirs: _Batches, ours: _Batches) -> tuple[str, str] | None:
    """Return the first batch that differs. One side may have read further, and may have opened another loader."""
    for iterator in theirs.keys() & ours.keys():
        pairs = zip(theirs[iterator], ours[iterator], strict=False)
        for number, (a, b) in enumerate(pairs, start=1):
            if a != b:
                return _batch(number, a), _batch(number, b)
    return None


def _batch(number: int, batch: tuple[int, int]) -> str:
    return f"batch {number} of {batch[0]} samples, checksum {batch[1]:08x}"


def _words(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _totals(runs: Sequence[ComparedRun]) -> PackageTotals:
    first = runs[0]
    ranks = [rank for run in runs for rank in run.ranks]
    seconds = [step.seconds for run in runs for step in run.ranks[0].steps[1:]] or [first.ranks[0].steps[0].seconds]
    low, median, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
    return PackageTotals(
        steps=len(first.ranks[0].steps),
        samples=sum(rank.samples for rank in first.ranks),
        schedulers=first.ranks[0].end.schedulers,
        parameters=first.ranks[0].steps[-1].parameters,
        files=first.files,
        peak_memory=max(rank.end.peak_memory for rank in ranks),
        peak_device_memory=max(rank.end.peak_device_memory for rank in ranks),
        seconds=Quartiles(low, median, high),
    )


def _largest_difference(theirs: ComparedRun, ours: ComparedRun) -> float | None:
    if theirs.parameters is None or ours.parameters is None:
        return None
    import torch

    a, b = (torch.load(file, weights_only=True) for file in (theirs.parameters, ours.parameters))
    if [tensor.shape for tensor in a] != [tensor.shape for tensor in b]:
        return None
    pairs = ((x, y) for x, y in zip(a, b, strict=True) if x.numel())
    return max((float((x.double() - y.double()).abs().max()) for x, y in pairs), default=0.0)
