"""The chart: one group of bars per row, one bar per contender, on a logarithmic scale around bare PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

from .results import Results

LEFT, RIGHT, WIDTH = 410, 60, 920
BAR, GAP, TOP = 11, 12, 64
COLOURS = {"ours": "#2f9e6e", "accelerate": "#8f96a3", "fabric": "#9b7fd4", "ray": "#4f9fd8"}
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #6e7781 }
.figure { font-size: 10px } .grid { stroke: #6e7781; stroke-opacity: 0.25 } .bare { stroke: #6e7781 }
"""
"""One grey that can be read on white and on black: a page's theme need not be that of the system."""


def draw(results: Results) -> str:
    """Draw every row that a peer was measured in too; where nobody else was, ours alone says little."""
    names = results.contenders
    rows = {what: known for what, known in results.rows.items() if len(known) > 1 and not what.startswith("control")}
    ratios = [row.ratio for known in rows.values() for row in known.values()] or [1.0]
    low, high = min(0.5, *ratios) * 0.9, max(2.0, *ratios) * 1.1

    def x(ratio: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(ratio / low) / math.log(high / low)

    heights = [BAR * len(known) + GAP for known in rows.values()]
    bottom = TOP + sum(heights)
    parts = [*_legend(results, names), *_axis(x, low, high, bottom)]
    top = TOP + GAP / 2
    for (what, known), height in zip(rows.items(), heights, strict=True):
        parts.append(_text(LEFT - 10, top + BAR * len(known) / 2 + 4, what, "end"))
        for index, name in enumerate(name for name in names if name in known):
            parts += _bar(x, known[name].ratio, top + index * BAR, COLOURS[name])
        top += height
    size = f'width="{WIDTH}" height="{bottom + 10}" viewBox="0 0 {WIDTH} {bottom + 10}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            "<title>Cost in terms of bare PyTorch</title>",
            f"<style>{STYLE}</style>",
            *parts,
            "</svg>\n",
        ]
    )


def _legend(results: Results, names: list[str]) -> list[str]:
    parts, left = [_text(LEFT - 10, 20, "cost / bare PyTorch; less is better", "end")], float(LEFT)
    for name in names:
        title = results.title(name)
        parts.append(f'<rect x="{left}" y="11" width="10" height="10" rx="2" fill="{COLOURS[name]}"/>')
        parts.append(_text(left + 15, 20, title))
        left += 30 + 6.6 * len(title)
    return parts


def _axis(x: Callable[[float], float], low: float, high: float, bottom: float) -> list[str]:
    parts = []
    for tick in (tick for tick in TICKS if low <= tick <= high):
        kind = "bare" if tick == 1 else "grid"
        parts.append(f'<line class="{kind}" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{TOP - 8}" y2="{bottom}"/>')
        parts.append(_text(x(tick), TOP - 14, "bare" if tick == 1 else f"{tick:g}", "middle"))
    return parts


def _bar(x: Callable[[float], float], ratio: float, top: float, colour: str) -> list[str]:
    begin, end = sorted((x(1), x(ratio)))
    bar = f'x="{begin:.1f}" y="{top:.1f}" width="{max(1.0, end - begin):.1f}" height="{BAR - 2}" rx="1"'
    figure = _text(end + 4, top + BAR - 3, f"{ratio:.2f}", kind="figure")
    return [f'<rect {bar} fill="{colour}"/>', figure]


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "label") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
