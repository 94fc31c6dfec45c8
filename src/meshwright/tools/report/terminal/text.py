"""Text of a certain width: styled, cut, and curves drawn with braille dots."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..runs.reading import Floats, Points

BOLD, DIM, RED, GREEN = "1", "2", "31", "32"
_COLOURS = ("38;5;32", "38;5;208", "38;5;36", "38;5;169", "38;5;178", "38;5;75", "38;5;131", "38;5;104")
_FOREVER = 1e12
_BRAILLE = 0x2800
_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
"""The bit of each of the 4 x 2 dots of a character."""
_ASCII = str.maketrans(
    {"·": "-", "…": "~", "●": "*", "│": "|", "┤": "|", "└": "+", "─": "-", "←": "<", "→": ">", "█": "#"}
)


class StyledText(NamedTuple):
    """A piece of a line, all in one style."""

    text: str
    style: str = ""


Line = Sequence[StyledText]


def run_colour(number: int) -> str:
    """Return the style of a run."""
    return _COLOURS[number % len(_COLOURS)]


def columns(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    return sum(_columns(character) for character in text)


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut(text: str, width: int) -> str:
    """Return a text that takes at most so many columns."""
    if columns(text) <= width:
        return text
    kept, used = "", 0
    for character in text:
        if used + _columns(character) > width - 1:
            break
        kept, used = kept + character, used + _columns(character)
    return kept + "…" if width > 0 else ""


def render(line: Line, width: int, coloured: bool, pad: bool = False) -> str:
    """Return a line as the terminal gets it, at most so many columns wide."""
    out, left = "", width
    for text, style in line:
        shown = cut(text, left)
        left -= columns(shown)
        out += f"\x1b[{style}m{shown}\x1b[0m" if coloured and style and shown else shown
        if left <= 0:
            break
    return out + " " * left if pad else out


def as_ascii(text: str) -> str:
    """Return a frame for a terminal without Unicode."""
    return "".join("*" if 0 < ord(character) - _BRAILLE < 256 else character for character in text.translate(_ASCII))


def format_number(value: float) -> str:
    """Return a number in few characters."""
    if not math.isfinite(value):
        return {math.inf: "inf", -math.inf: "-inf"}.get(value, "NaN")
    size = abs(value)
    if value == int(value) and size < 1e6:
        return str(int(value))
    if size >= 1e5 or size < 1e-3:
        mantissa, _, power = f"{value:.2e}".partition("e")
        return f"{mantissa}e{int(power)}"
    return f"{value:.4g}"


def format_seconds(seconds: float) -> str:
    """Return a duration in few characters."""
    whole = int(min(max(0.0, seconds), _FOREVER))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min" if whole < 172800 else f"{whole // 86400} d"


class Box(NamedTuple):
    """The part of the plane that a plot shows."""

    left: float
    right: float
    low: float
    high: float


def draw(curves: Iterable[tuple[int, Points]], width: int, height: int, box: Box) -> list[list[StyledText]]:
    """Return lines of braille characters with the curves of some runs in their colours."""
    bits = np.zeros((height, width), dtype=np.int64)
    owner = np.full((height, width), -1, dtype=np.int64)
    for run, points in curves:
        dots = _dots(points, width * 2, height * 4, box)
        mine = (dots.reshape(height, 4, width, 2) * _DOTS[None, :, None, :]).sum(axis=(1, 3))
        bits |= mine
        owner[mine > 0] = run
    return [
        [
            StyledText(chr(_BRAILLE + bit) if bit else " ", run_colour(run) if bit else "")
            for bit, run in zip(row, owners, strict=True)
        ]
        for row, owners in zip(bits.tolist(), owner.tolist(), strict=True)
    ]


def column_means(points: Points, width: int, left: float, right: float) -> Points:
    """Return the mean of what falls on each of the 2 x `width` columns of dots."""
    points = points.at(np.isfinite(points.value))
    column = _columns_of_dots(points.step, width * 2, left, right)
    points = points.at(np.argsort(column, kind="stable"))
    column = np.sort(column, kind="stable")
    begins = np.flatnonzero(np.diff(column, prepend=-1))
    if not len(begins):
        return points
    sizes = np.diff(begins, append=len(column))
    return Points(*(np.add.reduceat(values, begins) / sizes for values in points))


def _columns_of_dots(x: Floats, width: int, left: float, right: float) -> npt.NDArray[np.int64]:
    return np.rint((x - left) / ((right - left) or 1.0) * (width - 1)).astype(np.int64)


def _dots(points: Points, width: int, height: int, box: Box) -> npt.NDArray[np.bool_]:
    """Draw one curve: in every column of dots from its lowest to its highest value, joined to its neighbours."""
    dots = np.zeros((height, width), dtype=bool)
    points = points.at(np.isfinite(points.value))
    if not len(points.value):
        return dots
    column = _columns_of_dots(points.step, width, box.left, box.right)
    row = np.rint((box.high - points.value) / ((box.high - box.low) or 1.0) * (height - 1)).astype(int)
    order = np.argsort(column, kind="stable")
    column, row = column[order], row[order]
    begins = np.flatnonzero(np.diff(column, prepend=-1))
    positions, highest, lowest = column[begins], np.minimum.reduceat(row, begins), np.maximum.reduceat(row, begins)
    first, last = row[begins], row[np.append(begins[1:], len(row)) - 1]
    for i, position in enumerate(positions):
        dots[highest[i] : lowest[i] + 1, position] = True
        if i:
            _join(dots, (positions[i - 1], last[i - 1]), (position, first[i]))
    return dots


def _join(dots: npt.NDArray[np.bool_], begin: tuple[int, int], end: tuple[int, int]) -> None:
    count = max(abs(end[0] - begin[0]), abs(end[1] - begin[1]), 1)
    share = np.arange(count + 1) / count
    positions = np.rint(begin[0] + share * (end[0] - begin[0])).astype(int)
    dots[np.rint(begin[1] + share * (end[1] - begin[1])).astype(int), positions] = True
