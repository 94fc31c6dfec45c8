"""The table that people read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .interleave import Comparison

HEADER = ("what", "bare us", "ours us", "ratio", "95 % interval", "target", "verdict")
REFERENCE_HEADER = "reference"


def render(rows: Sequence[Comparison], reference: Mapping[str, float] | None = None) -> str:
    """Lay the rows out in aligned columns, with their notes below.

    `reference` adds a column: for each row's name, the ratio of another version of the library.
    """
    lines: list[tuple[str, ...]] = [HEADER, *(_cells(row) for row in rows)]
    if reference is not None:
        column = [REFERENCE_HEADER, *(_ratio(reference.get(row.what)) for row in rows)]
        lines = [(*line, cell) for line, cell in zip(lines, column, strict=True)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    aligned = [_aligned(line, widths) for line in lines]
    rule = "  ".join("-" * width for width in widths)
    notes = [f"{row.what}: {note}" for row in rows for note in row.notes]
    return "\n".join([aligned[0], rule, *aligned[1:], *notes])


def _cells(row: Comparison) -> tuple[str, ...]:
    return (
        row.what,
        f"{row.bare_us:,.1f}",
        f"{row.ours_us:,.1f}",
        _ratio(row.ratio),
        f"{row.low:.3f} - {row.high:.3f}",
        "-" if row.target is None else f"{row.target:.2f}",
        row.verdict,
    )


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"


def _aligned(cells: tuple[str, ...], widths: list[int]) -> str:
    """Put the first column to the left and the numbers to the right."""
    first, *rest = (
        f"{cell:<{width}}" if i == 0 else f"{cell:>{width}}"
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *rest]).rstrip()
