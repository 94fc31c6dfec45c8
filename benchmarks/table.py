"""The table that people read, in Markdown."""

from __future__ import annotations

from .interleave import Comparison
from .results import TITLES, Results

NOT_MEASURED = {
    "Composer 0.32.1": "it requires torch<2.7.1",
    "torchtitan 0.3.0": "without a GPU it ends with: No module named 'triton'",
}
"""Libraries that were tried beside this torch on a CPU, and why they have no column."""


def render(results: Results) -> str:
    """Lay out one row per measurement and one column per contender, with the notes below."""
    peers = [name for name in results.contenders if name != "ours"]
    header = ["what", "bare", "ours (95 % interval)", "target", *(results.title(name) for name in peers)]
    lines = [header, ["---", *["--:"] * (len(header) - 1)]]
    for what, known in results.rows.items():
        first = next(iter(known.values()))
        others = [f"{known[name].ratio:.2f}" if name in known else "-" for name in peers]
        lines.append([what, _time(first), _ours(known.get("ours")), _target(known.get("ours")), *others])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = [
        f"{what}: {note}" for what, known in results.rows.items() if "ours" in known for note in known["ours"].notes
    ]
    notes += [f"{_failed(where)} could not: {said}" for where, said in results.failures.items()]
    if peers:
        notes += [f"{name} is not measured: {why}" for name, why in NOT_MEASURED.items()]
    return "\n".join([table, "", *(f"- {note}" for note in notes)]).rstrip()


def _ours(row: Comparison | None) -> str:
    if row is None:
        return "-"
    low, high = row.interval
    return f"{row.ratio:.3f} ({low:.3f} - {high:.3f})"


def _target(row: Comparison | None) -> str:
    return "" if row is None or row.target is None else f"{row.target:.2f} {row.verdict}"


def _time(row: Comparison) -> str:
    """Say what bare PyTorch takes, or how many bytes are expected where memory is measured."""
    microseconds = row.bare_us
    if row.what.startswith("peak memory"):
        return f"{microseconds:,.0f} MB"
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{microseconds / size:.2f} {unit}"
    return f"{microseconds:.0f} us"


def _failed(where: str) -> str:
    name, _, subject = where.partition(", ")
    return f"{subject}: {TITLES[name]}"
