"""A comparison as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from .verdict import ComparisonVerdict, PackageTotals, Quartiles

_DIFFERENCES = "docs/differences.md"
_MOST_FILES = 6


def page_of(verdict: ComparisonVerdict, names: tuple[str, str]) -> str:
    """Return what is known of one number of processes: the answer, the steps, and what each package took."""
    return "\n".join((*_answer(verdict, names), "", *_steps(verdict), "", *_totals(verdict, names), ""))


def _answer(verdict: ComparisonVerdict, names: tuple[str, str]) -> Iterator[str]:
    where = "1 process" if verdict.processes == 1 else f"{verdict.processes} processes"
    first = verdict.first
    if not verdict.is_known:
        assert verdict.itself is not None
        yield (
            f"{where}: NOT KNOWN. Two runs under the same package differ: the {verdict.itself.what} "
            f"{_at(verdict.itself.step)}."
        )
    elif first is None:
        yield f"{where}: bitwise equal, {verdict.theirs.steps} steps"
    else:
        yield f"{where}: DIFFERENT {_at(first.step)}: the {first.what} of rank {first.rank}"
        yield f"  {names[0]:<20}  {first.theirs}"
        yield f"  {names[1]:<20}  {first.ours}"
    for cause in verdict.causes:
        yield f"  perhaps because  {cause.why}" + (f' ({_DIFFERENCES}: "{cause.row}")' if cause.row else "")
        yield f"  to be equal      {cause.remedy}"
    if verdict.is_known and first is not None and not verdict.causes:
        yield f"  No known cause fits. {_DIFFERENCES} lists the intended differences; report what is not there."


def _at(step: int) -> str:
    return f"at step {step}" if step else "before the first step"


def _steps(verdict: ComparisonVerdict) -> Iterator[str]:
    yield f"  {'step':>4}  {'loss: 1.x':>14}  {'ours':>14}  {'gradient: 1.x':>14}  {'ours':>14}"
    first = None if verdict.first is None else verdict.first.step
    for step, ((a, b), (x, y)) in enumerate(zip(verdict.losses, verdict.gradient_norms, strict=True), start=1):
        mark = "  <- first difference" if step == first else ""
        yield f"  {step:>4}  {a:>14.8g}  {b:>14.8g}  {x:>14.8g}  {y:>14.8g}{mark}"


def _totals(verdict: ComparisonVerdict, names: tuple[str, str]) -> Iterator[str]:
    a, b = verdict.theirs, verdict.ours
    yield _row("", names[0], names[1])
    yield _row("optimizer steps", a.steps, b.steps)
    yield _row("scheduler at", _positions(a), _positions(b))
    yield _row("samples read", a.samples, b.samples) + _read_ahead(a, b, verdict)
    yield _row("parameters at the end", a.parameters, b.parameters) + (
        f"  largest difference {verdict.largest:.3g}" if verdict.largest is not None else ""
    )
    yield _row("files written", _files(a), _files(b))
    yield _row("peak memory", _memory(a.peak_memory), _memory(b.peak_memory))
    if a.peak_device_memory or b.peak_device_memory:
        yield _row("of the accelerator", _memory(a.peak_device_memory), _memory(b.peak_device_memory))
    yield _row("time of a step", _time(a.seconds), _time(b.seconds)) + (
        f"  ours/1.x {b.seconds.median / a.seconds.median:.2f}" if a.seconds.median else ""
    )


def _row(what: str, theirs: object, ours: object) -> str:
    return f"  {what:<22}  {theirs!s:<26}  {ours!s:<26}".rstrip()


def _positions(totals: PackageTotals) -> str:
    return ", ".join(map(str, totals.schedulers)) or "-"


def _read_ahead(a: PackageTotals, b: PackageTotals, verdict: ComparisonVerdict) -> str:
    return "  1.x reads a batch ahead" if a.samples > b.samples and verdict.first is None else ""


def _files(totals: PackageTotals) -> str:
    more = f" and {len(totals.files) - _MOST_FILES} more" if len(totals.files) > _MOST_FILES else ""
    return ", ".join(totals.files[:_MOST_FILES]) + more or "-"


def _memory(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"


def _time(seconds: Quartiles) -> str:
    return f"{seconds.median * 1e3:.3g} ms ({seconds.low * 1e3:.3g}-{seconds.high * 1e3:.3g})"
