"""Search: trace the most promising choices, and rank those that fit.

[Note: what is not traced] A choice is left out if its least memory exceeds a device; if one with the same mesh and
batch fits with fewer settings that save memory, since each of them costs time; if one that needs no more memory did not
fit; and if it is expected to be much slower than three that fit. At most `limit` choices are traced, those first that
should fit, the fastest first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ..memory.fit import EXPANDABLE, FITS, Fit
from ..report.numbers import size
from ..result import Candidate, Plan
from .choices import Choice
from .estimates import Estimates

BEST = 3
LIMIT = 24
_SLOWER = 1.5
_REFUSALS = 2
_GAIN = 0.95
_EXPANDABLE_LABEL = "expandable_segments"

Evaluate = Callable[[Choice], Plan]
"""Trace a choice and plan it; raise ValueError if the script cannot run so."""
Report = Callable[[str], None]


@dataclass
class Tried:
    """A choice that was traced."""

    choice: Choice
    plan: Plan

    @property
    def fit(self) -> Fit:
        """Return how the devices of the cluster suffice."""
        return self.plan.fits[0]

    @property
    def fits(self) -> bool:
        """Return whether it can be recommended."""
        return self.fit.verdict in (FITS, EXPANDABLE)

    @property
    def seconds(self) -> float:
        """Return the time of a step, which has the same global batch in all choices."""
        assert self.plan.rates is not None
        return self.plan.rates.seconds

    def candidate(self) -> Candidate:
        """Return it as part of a plan."""
        expandable = [_EXPANDABLE_LABEL] if self.fit.verdict == EXPANDABLE else []
        return Candidate(
            axes=self.choice.axes,
            micro_batch=self.choice.samples_at_once,
            settings=self.choice.options(),
            allocated=self.fit.allocated,
            reserved=self.fit.needed,
            fits=self.fits,
            rates=self.plan.rates,
            accumulation=self.choice.accumulation,
            labels=[*self.choice.labels(), *expandable],
        )


@dataclass
class PlanSearch:
    """One search, which knows what it tried."""

    estimates: Estimates
    evaluate: Evaluate
    report: Report
    limit: int = LIMIT
    tried: list[Tried] = field(default_factory=list)
    refused: dict[Choice, str] = field(default_factory=dict)
    """Choices that the script cannot run with, and why."""
    _seconds: dict[Choice, float] = field(default_factory=dict)

    def run(self, choices: Sequence[Choice], base: Plan) -> list[Tried]:
        """Trace choices until nothing better is to be expected, and return what was tried, the best first.

        Ctrl-C ends the search; what was found until then is returned.
        """
        own = self.estimates.base
        self.tried.append(Tried(own, base))
        capacity = self.tried[0].fit.available
        possible = [each for each in choices if self.estimates.least_memory(each) <= capacity]
        self.report(f"{len(choices)} ways to keep the global batch, {len(choices) - len(possible)} of them cannot fit")
        waiting, traced = [each for each in possible if each != own], 0
        if not possible:  # the least of them tells what offloading its state would leave
            sharded = [each for each in choices if each.shards > 1]
            waiting = sorted(sharded, key=self.estimates.least_memory)[:1]
        try:
            while traced < self.limit:
                waiting = [choice for choice in waiting if not self._is_pointless(choice)]
                if not waiting:
                    break
                choice = min(waiting, key=self._promise)
                waiting.remove(choice)
                traced += 1
                self._try(choice, f"{traced} of at most {self.limit}")
        except KeyboardInterrupt:
            self.report(f"stopped after {traced}")
        return self.ranked()

    def ranked(self) -> list[Tried]:
        """Return what was tried: what fits by time, the rest by memory."""
        fitting = sorted((each for each in self.tried if each.fits), key=lambda each: each.seconds)
        others = sorted((each for each in self.tried if not each.fits), key=lambda each: each.fit.allocated)
        return fitting + others

    def _promise(self, choice: Choice) -> tuple[bool, bool, float]:
        """Return what is smallest for the choice to be traced next; what was traced corrects the expectation."""
        memory = self.estimates.expected_memory(choice) * self._correction(
            choice, lambda each: each.fit.needed / self.estimates.expected_memory(each.choice)
        )
        lacks = memory > self.tried[0].fit.available
        seconds = self._likely_seconds(choice)
        return lacks, self._is_variant(choice, seconds), memory if lacks else seconds

    def _is_variant(self, choice: Choice, seconds: float) -> bool:
        """Return whether only replicas and shards differ from one that fits, and little is to be gained."""
        return any(
            each.fits and seconds > _GAIN * each.seconds
            for each in self.tried
            if replace(each.choice, dp_replicate=1, dp_shard=1) == replace(choice, dp_replicate=1, dp_shard=1)
        )

    def _likely_seconds(self, choice: Choice) -> float:
        return self._expected_seconds(choice) * self._correction(
            choice, lambda each: each.seconds / self._expected_seconds(each.choice)
        )

    def _correction(self, choice: Choice, ratio: Callable[[Tried], float]) -> float:
        """Return by what expectations were wrong, of choices of the same kind if there are any."""
        alike = [each for each in self.tried if _kind(each.choice) == _kind(choice)]
        return statistics.median(map(ratio, alike or self.tried))

    def _expected_seconds(self, choice: Choice) -> float:
        if choice not in self._seconds:
            self._seconds[choice] = self.estimates.seconds(choice)
        return self._seconds[choice]

    def _try(self, choice: Choice, number: str) -> None:
        name = describe(choice)
        try:
            found = Tried(choice, self.evaluate(choice))
        except ValueError as error:
            self.refused[choice] = str(error)
            self.report(f"{number}: {name}: refused: {str(error).splitlines()[0]}")
            return
        self.tried.append(found)
        memory = f"{size(found.fit.needed)} of {size(found.fit.available)}"
        self.report(f"{number}: {name}: {found.fit.verdict}, {memory}, {found.seconds:.3g} s")

    def _is_pointless(self, choice: Choice) -> bool:
        if any(_makes_pointless(each, choice) for each in self.tried):
            return True
        if self._is_like_refused(choice):
            return True
        best = sorted(each.seconds for each in self.tried if each.fits)
        if len(best) < BEST:
            return False
        return self._likely_seconds(choice) > _SLOWER * best[BEST - 1]

    def _is_like_refused(self, choice: Choice) -> bool:
        """Return whether its mesh was refused, or all that accumulate more: scripts may end after few batches."""
        own = self.estimates.base.accumulation
        alike = [each for each in self.refused if (each.accumulation > own) == (choice.accumulation > own)]
        if any(_same_mesh(each, choice) for each in alike):
            return True
        runs = any(each.choice.accumulation > own for each in self.tried)
        return choice.accumulation > own and not runs and len(alike) >= _REFUSALS


def _makes_pointless(tried: Tried, choice: Choice) -> bool:
    """Return whether a choice cannot be better than one that was tried."""
    known = tried.choice
    if tried.fits:
        same = _same_mesh(known, choice) and known.batch == choice.batch and known.microbatches == choice.microbatches
        return same and choice.saves_as_much_as(known)
    needs_more = choice.shards <= known.shards and choice.samples_at_once >= known.samples_at_once
    return _split(known) == _split(choice) and needs_more and known.saves_as_much_as(choice) and choice.pp == 1


def _same_mesh(a: Choice, b: Choice) -> bool:
    return a.axes == b.axes


def _split(choice: Choice) -> tuple[int, int, int]:
    return choice.tp, choice.cp, choice.pp


def _kind(choice: Choice) -> tuple[object, ...]:
    return *_split(choice), choice.is_replicated


def describe(choice: Choice) -> str:
    """Return a choice in a few words."""
    axes = " x ".join(f"{axis} {size}" for axis, size in choice.axes.items()) or "one process"
    accumulated = f" x {choice.accumulation}" if choice.accumulation > 1 else ""
    return ", ".join([axes, f"batch {choice.batch}{accumulated}", *choice.labels()])
