"""Draw what a terminal shows as an SVG in the colours of the site: it adds a frame and a title, and loads nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

CELL, LINE, SIZE, PAD, BAR = 8.4, 20.0, 14, 22, 38
INK, DIM, BACK, EDGE, HEAD = "#d7e3e0", "#8fa39e", "#0f1917", "#2b3d39", "#5ed3bd"
SGR = {30: "#5b6f6a", 31: "#ff8f7d", 32: "#6fdc8f", 33: "#f0c068", 34: "#7fb5ff", 35: "#d9a0f0", 36: "#5ed3bd", 37: INK}
SGR |= {code + 60: colour for code, colour in SGR.items()} | {90: DIM}
FONT = "'JetBrains Mono',ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"


@dataclass(frozen=True)
class Style:
    """How a piece of text is shown."""

    colour: str = ""
    bold: bool = False
    dim: bool = False


@dataclass(frozen=True)
class Piece:
    """Text of one style in one row."""

    column: int
    text: str
    style: Style


def draw(text: str, title: str, file: Path, columns: int) -> None:
    """Write the picture of a text with SGR colours. Lines that begin with `$ ` were typed."""
    rows = [line for row in _rows(text.strip("\n")) for line in _wrapped(row, columns)]
    width, height = round(columns * CELL + 2 * PAD), round(BAR + len(rows) * LINE + PAD + 8)
    file.write_text(
        "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
                f'width="{width}" height="{height}" role="img">',
                f"<title>{escape(title)}</title>",
                f"<style>text{{font:{SIZE}px {FONT};white-space:pre}}.b{{font-weight:700}}</style>",
                f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="10" '
                f'fill="{BACK}" stroke="{EDGE}"/>',
                f'<path d="M1 {BAR - 0.5}H{width - 1}" stroke="{EDGE}"/>',
                "".join(f'<circle cx="{PAD + 18 * n}" cy="{BAR / 2}" r="5" fill="{EDGE}"/>' for n in range(3)),
                f'<text x="{width / 2}" y="{BAR / 2 + 5}" text-anchor="middle" fill="{DIM}">{escape(title)}</text>',
                *(
                    shape
                    for number, row in enumerate(rows)
                    for shape in _shapes(row, BAR + 12 + (number + 0.75) * LINE)
                ),
                "</svg>",
                "",
            ]
        )
    )


def _rows(text: str) -> Iterator[list[Piece]]:
    style = Style()
    for line in text.replace("\r", "").split("\n"):
        column, row = 0, []
        for part in re.split(r"(\x1b\[[0-9;?]*[A-Za-z])", line):
            if part.startswith("\x1b"):
                style = _styled(style, part)
            elif part:
                row.append(Piece(column, part, style))
                column += len(part)
        if line.startswith("$ "):
            row = [Piece(0, "$", Style(HEAD)), Piece(2, line[2:], Style(bold=True))]
        yield row


def _styled(style: Style, escape_code: str) -> Style:
    if not escape_code.endswith("m"):
        return style
    codes = [int(code or 0) for code in escape_code[2:-1].split(";")]
    while codes:
        match codes.pop(0):
            case 0:
                style = Style()
            case 1:
                style = replace(style, bold=True)
            case 2:
                style = replace(style, dim=True)
            case 38:  # one of the 256
                style = replace(style, colour=_indexed(codes[1]))
                codes = codes[2:]
            case 39:
                style = replace(style, colour="")
            case code if code in SGR:
                style = replace(style, colour=SGR[code])
    return style


def _indexed(number: int) -> str:
    if number < 16:
        return SGR[30 + number if number < 8 else 82 + number]
    if number > 231:
        return "#" + f"{8 + 10 * (number - 232):02x}" * 3
    number -= 16
    levels = (0, 95, 135, 175, 215, 255)
    return "#" + "".join(f"{levels[n]:02x}" for n in (number // 36, number // 6 % 6, number % 6))


def _wrapped(row: list[Piece], columns: int) -> list[list[Piece]]:
    """Break a row where a terminal of this width does."""
    lines: dict[int, list[Piece]] = {0: []}
    for piece in row:
        column, text = piece.column, piece.text
        while text:
            line, place = divmod(column, columns)
            head, text = text[: columns - place], text[columns - place :]
            lines.setdefault(line, []).append(Piece(place, head, piece.style))
            column += len(head)
    return list(lines.values())


def _shapes(row: list[Piece], y: float) -> Iterator[str]:
    for piece in row:
        style = piece.style
        fill = style.colour or (DIM if style.dim else INK)
        for found in re.finditer(r"─+|[^─]+", piece.text):
            shown = found[0].strip()
            if not shown:
                continue
            x = PAD + (piece.column + found.start() + len(found[0]) - len(found[0].lstrip())) * CELL
            length = len(shown) * CELL
            if shown[0] == "─":  # a rule is a line: fonts leave gaps
                yield f'<path d="M{x:.1f} {y - 4.5:.1f}h{length:.1f}" stroke="{DIM}"/>'
                continue
            bold = ' class="b"' if style.bold or "─" in piece.text else ""
            yield (
                f'<text x="{x:.1f}" y="{y:.1f}"{bold} fill="{fill}" textLength="{length:.1f}">{escape(shown)}</text>'
            )
