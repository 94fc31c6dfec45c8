"""Plan whether llm-foundry's runs fit: all of them ran.

    python -m tests.tools.plan.published.figures fits

A run whose model, recomputation and sharding equal those of another, and which has no fewer GPUs, no more tokens in a
micro-batch and no smaller devices, needs no more memory than it. Only runs that demand most are planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from meshwright.runtime.devices.catalogue import load
from meshwright.tools.plan.memory.expand import expanded
from meshwright.tools.plan.memory.fit import Fit, fit_of, libraries_of
from meshwright.tools.plan.memory.peak import memory_of
from meshwright.tools.plan.plan import MORE, WantedTrace

from .harness import CaseTraces
from .outcomes import FULL
from .rows import Case, read_cases

_GROUPS = 1


@dataclass(frozen=True)
class Planned:
    """A run that was planned, and the runs that need no more than it."""

    case: Case
    fit: Fit
    followers: tuple[Case, ...]

    @property
    def fits(self) -> bool:
        """Whether it is planned to fit, in the worst case with an allocator that returns memory now and then."""
        return self.fit.verdict != FULL

    def __str__(self) -> str:
        room = f"{self.fit.needed / 2**30:.1f} of {self.fit.available / 2**30:.1f} GiB"
        words = f"{self.case.line:3} {self.case.cluster:13} {self.case.label[:48]:48} {self.fit.verdict}, {room}"
        return f"{words}, and {len(self.followers)} that need no more"


def foundry() -> list[Case]:
    """Return the rows of llm-foundry."""
    return [case for case in read_cases() if case.source == "llm-foundry"]


def demands_as_much(a: Case, b: Case) -> bool:
    """Return whether a run needs at least as much of its devices as another one."""
    first, second = a.options, b.options
    assert first is not None
    assert second is not None
    names = ("family", "layers", "hidden", "heads", "ffn", "vocab", "recompute", "reshard")
    if any(getattr(first, name) != getattr(second, name) for name in names):
        return False
    return (
        first.dp_shard <= second.dp_shard
        and first.batch * first.seq >= second.batch * second.seq
        and _memory(a.cluster) <= _memory(b.cluster)
        and (first.accumulation > 1 or second.accumulation == 1)
        and first.precision in ("mixed", second.precision)  # gradients are reduced in fp32
    )


@cache
def _memory(cluster: str) -> int:
    return load().cluster(cluster).device.memory


def hardest(cases: Sequence[Case]) -> list[tuple[Case, tuple[Case, ...]]]:
    """Return the runs that need no less than any other, each with those that it stands for."""
    found: dict[Case, list[Case]] = {
        case: []
        for case in cases
        if not any(
            demands_as_much(o, case) and (o.line < case.line or not demands_as_much(case, o))
            for o in cases
            if o is not case
        )
    }
    for case in cases:
        if case not in found:
            next(followers for above, followers in found.items() if demands_as_much(above, case)).append(case)
    return sorted(((case, tuple(followers)) for case, followers in found.items()), key=lambda item: -len(item[1]))


def planned(cases: Sequence[Case], folder: Path) -> Iterator[Planned]:
    """Plan the hardest runs, those first that stand for most."""
    for case, followers in hardest(cases):
        yield Planned(case, fit_of_case(case, folder), followers)


def fit_of_case(case: Case, folder: Path) -> Fit:
    """Plan the memory of one run from one trace of few blocks."""
    [trace] = CaseTraces(case, folder).get([WantedTrace(rank=0, blocks=MORE)])
    device = load().cluster(case.cluster).device
    memory = memory_of(expanded(trace, trace.all_blocks - trace.blocks))
    libraries = libraries_of(device.context, _GROUPS)
    return fit_of(memory, device.name, device.memory + device.context, libraries)
