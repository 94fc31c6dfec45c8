"""What plans of published rows say beside what was measured, and their errors by source."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .rows import GIB, Case

FULL = "does not fit"


@dataclass(frozen=True)
class Outcome:
    """One published row and its plan."""

    case: Case
    memory: float = 0.0
    """Bytes by the definition of the published figure."""
    allocated: float = 0.0
    rate: float = 0.0
    """Tokens per second and device."""
    plain_rate: float = 0.0
    """The same with today's kernels; see kernels_2023.yaml."""
    verdict: str = ""
    margin: float = 0.0
    planned_in: float = 0.0
    failure: str = ""

    @property
    def memory_error(self) -> float | None:
        """Return how much more memory was planned than was measured, as a fraction."""
        return None if self.failure or self.case.memory is None else self.memory / self.case.memory - 1

    @property
    def rate_error(self) -> float | None:
        """Return how much faster the plan is than the run was, as a fraction."""
        return None if self.failure or self.case.rate is None else self.rate / self.case.rate - 1

    @property
    def plain_rate_error(self) -> float | None:
        """Return the error of `plain_rate`."""
        return None if self.failure or self.case.rate is None else self.plain_rate / self.case.rate - 1

    def __str__(self) -> str:
        if self.failure:
            return f"{self.case.line:3} {self.case.source:11} {self.case.label[:60]}: {self.failure}"
        memory, rate = self.memory_error, self.rate_error
        words = [f"{self.case.line:3} {self.case.source:11} {self.case.label[:48]:48}"]
        published = "" if self.case.memory is None else f" of {self.case.memory / GIB:6.2f}"
        words.append(f"{self.memory / GIB:6.2f}{published} GiB {'' if memory is None else f'{memory:+.1%}'}")
        words.append(f"{self.rate:7.0f} tokens/s {'' if rate is None else f'{rate:+.1%}'}")
        return " | ".join([*words, self.verdict, f"{self.planned_in:.0f} s"])


def write_outcomes(outcomes: Iterable[Outcome], path: Path) -> None:
    """Write a row of figures per case."""
    rows = [_fields(outcome) for outcome in outcomes]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _fields(outcome: Outcome) -> dict[str, object]:
    case = outcome.case
    return {
        "line": case.line,
        "source": case.source,
        "held_out": int(case.held_out),
        "compiled": int(case.compiled),
        "label": case.label[:80],
        "memory_GiB": _gib(case.memory),
        "planned_GiB": _gib(outcome.memory),
        "memory_error_percent": _percent(outcome.memory_error),
        "tokens_s": _round(case.rate),
        "planned_tokens_s": _round(outcome.rate),
        "rate_error_percent": _percent(outcome.rate_error),
        "verdict": outcome.verdict,
        "margin_GiB": _gib(outcome.margin),
        "seconds": f"{outcome.planned_in:.1f}",
        "why_not": outcome.failure,
    }


def _gib(size: float | None) -> str:
    return "" if not size else f"{size / GIB:.2f}"


def _round(value: float | None) -> str:
    return "" if not value else f"{value:.1f}"


def _percent(error: float | None) -> str:
    return "" if error is None else f"{100 * error:+.1f}"


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of the values is, between neighbours by a line."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def _line(name: str, errors: Sequence[float]) -> str:
    if not errors:
        return f"| {name} | 0 | | | |"
    sizes = [abs(error) for error in errors]
    return (
        f"| {name} | {len(errors)} | {quantile(sizes, 0.5):.1%} | {quantile(sizes, 0.9):.1%} | "
        f"{quantile(errors, 0.5):+.1%} |"
    )


_TABLES = {
    "memory": "memory_error",
    "tokens per second": "rate_error",
    "tokens per second, kernels of today for all sources": "plain_rate_error",
}


def table(title: str, errors: Iterable[tuple[Case, float | None]]) -> str:
    """Return errors by source, by kind of kernels, and by whether rows are held out."""
    groups: dict[str, list[float]] = {}
    for case, error in errors:
        if error is None:
            continue
        kind = "compiled or fused" if case.compiled else "eager"
        held = "held out" if case.held_out else "fitted"
        for name in ("all", held, kind, f"{kind}, {held}", case.source, f"{case.source}, {held}"):
            groups.setdefault(name, []).append(error)
    head = [f"| {title} | rows | median error | 90th percentile | signed median |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([*head, *(_line(name, groups[name]) for name in sorted(groups))])


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return tables of the errors by source."""
    lines = []
    for title, error_name in _TABLES.items():
        lines += ["", table(title, [(outcome.case, getattr(outcome, error_name)) for outcome in outcomes])]
    planned = [outcome for outcome in outcomes if not outcome.failure]
    misfits = [outcome for outcome in planned if outcome.verdict == FULL]
    lines += ["", f"{len(planned)} rows planned, all of which ran; planned not to fit: {len(misfits)}"]
    lines += [str(outcome) for outcome in misfits]
    failed = [outcome for outcome in outcomes if outcome.failure and outcome.case.options is not None]
    lines += [f"not planned: {len(failed)}", *map(str, failed)]
    return "\n".join(lines)
