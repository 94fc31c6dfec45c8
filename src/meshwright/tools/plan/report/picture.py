"""Draw memory over a step as a stacked picture, in SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from ..memory.peak import Timeline
from ..trace import ACTIVATIONS, COMMUNICATION, COPIES, GATHERED, GRADIENTS, OPTIMIZER, TEMPORARIES, WEIGHTS
from .numbers import GIB, size

STACK = (WEIGHTS, OPTIMIZER, GRADIENTS, ACTIVATIONS, COPIES, GATHERED, COMMUNICATION, TEMPORARIES)
"""From below: what stays is below what comes and goes."""
_WIDTH, _HEIGHT = 960.0, 340.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 10.0, 26.0, 18.0
_LABELLED = 44.0
"""Pixels that a pass needs for its name."""


def picture(timeline: Timeline, capacity: float | None = None, device: str = "") -> str:
    """Return the picture; capacity is what the device leaves for the allocator."""
    if not timeline.at:
        return ""
    sums = [sum(sizes) for sizes in zip(*timeline.bytes.values(), strict=True)]
    highest = max(*sums, *timeline.reserved)
    shown = capacity is not None and capacity < 1.8 * highest
    top = 1.06 * max(highest, capacity if shown and capacity is not None else 0.0)
    frame = _Axes(top)
    owners = [owner for owner in STACK if any(timeline.bytes.get(owner, ()))]
    parts = [
        f'<svg class="picture" viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img" '
        f'aria-label="memory over one step, at most {size(max(sums))}">',
        *frame.grid(),
        *_areas(timeline, owners, frame),
        _line(timeline, frame),
        *_passes(timeline, frame),
    ]
    if shown and capacity is not None:
        height = frame.y(capacity)
        parts.append(
            f'<line class="capacity" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>'
        )
        words = escape(f"{device}: {size(capacity)} for the allocator")
        parts.append(f'<text class="limit" x="{_WIDTH - _RIGHT - 6}" y="{height - 5:.1f}">{words}</text>')
    return "\n".join([*parts, "</svg>"])


def legend(timeline: Timeline) -> str:
    """Return the names of the colours."""
    owners = [owner for owner in STACK if any(timeline.bytes.get(owner, ()))]
    keys = [f'<span><i class="key {owner}"></i>{owner}</span>' for owner in owners]
    return f'<p class="legend">{"".join(keys)}<span><i class="key held"></i>held by the allocator</span></p>'


class _Axes:
    """The axes of the picture."""

    def __init__(self, top: float) -> None:
        self.top = top

    def x(self, fraction: float) -> float:
        return _LEFT + fraction * (_WIDTH - _LEFT - _RIGHT)

    def y(self, count: float) -> float:
        return _HEIGHT - _BOTTOM - count / self.top * (_HEIGHT - _TOP - _BOTTOM)

    def grid(self) -> list[str]:
        unit, name = next(
            (u, n) for u, n in ((GIB, "GiB"), (GIB / 1024, "MiB"), (GIB / 2**20, "KiB"), (1.0, "B")) if self.top >= u
        )
        step = _nice(self.top / unit / 6)
        lines = []
        for number in range(int(self.top / unit / step) + 1):
            height = self.y(number * step * unit)
            lines.append(
                f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>'
            )
            lines.append(f'<text class="tick" x="{_LEFT - 6}" y="{height + 4:.1f}">{number * step:g}</text>')
        return [*lines, f'<text class="unit" x="{_LEFT - 6}" y="{_TOP - 12}">{name}</text>']


def _nice(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step)


def _areas(timeline: Timeline, owners: Sequence[str], frame: _Axes) -> list[str]:
    below = [0.0] * len(timeline.at)
    areas = []
    for owner in owners:
        above = [low + extra for low, extra in zip(below, timeline.bytes[owner], strict=True)]
        points = [*_points(timeline, above, frame), *reversed(_points(timeline, below, frame))]
        peak = size(max(timeline.bytes[owner]))
        areas.append(
            f'<polygon class="{owner}" points="{" ".join(points)}"><title>{owner}, at most {peak}</title></polygon>'
        )
        below = above
    return areas


def _line(timeline: Timeline, frame: _Axes) -> str:
    return f'<polyline class="held" points="{" ".join(_points(timeline, timeline.reserved, frame))}"/>'


def _points(timeline: Timeline, sizes: Sequence[float], frame: _Axes) -> list[str]:
    """Return a curve that reaches both ends of the step."""
    inner = [f"{frame.x(at):.1f},{frame.y(count):.1f}" for at, count in zip(timeline.at, sizes, strict=True)]
    ends = [f"{frame.x(at):.1f},{frame.y(sizes[index]):.1f}" for at, index in ((0.0, 0), (1.0, -1))]
    return [ends[0], *inner, ends[1]]


def _passes(timeline: Timeline, frame: _Axes) -> list[str]:
    parts = []
    following = [begin for begin, _ in timeline.passes[1:]] + [1.0]
    for (begin, phase), end in zip(timeline.passes, following, strict=True):
        left, right = frame.x(begin), frame.x(end)
        if begin > 0:
            parts.append(
                f'<line class="pass" x1="{left:.1f}" x2="{left:.1f}" y1="{_TOP - 8}" y2="{_HEIGHT - _BOTTOM}"/>'
            )
        if right - left >= _LABELLED:
            parts.append(f'<text class="phase" x="{(left + right) / 2:.1f}" y="{_HEIGHT - 4}">{escape(phase)}</text>')
    return parts
