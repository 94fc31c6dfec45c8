"""Show a plan as text, between rules and without boxes, so that it can be copied and searched."""

from __future__ import annotations

import shutil
import textwrap

from ....program import program_name
from ..result import Plan
from .tables import (
    CANNOT_KNOW,
    Table,
    facts,
    fit_table,
    largest_table,
    ledger_table,
    lever_table,
    memory_table,
    search_table,
    summary,
    time_table,
)

_NAME_WIDTH = 11
_BEST = 3


def as_text(plan: Plan) -> str:
    """Return the text of a plan."""
    width = min(120, max(72, shutil.get_terminal_size((100, 24)).columns))
    lines = [_rule(f"{program_name()} plan", width)]
    for name, words in [*facts(plan), *summary(plan)]:
        lines += _field(name, words, width)
    slowest = plan.slowest
    sections = [
        ("memory per rank", memory_table(plan)),
        (f"largest at the peak of rank {plan.largest.rank}", largest_table(plan.largest)),
        ("devices", fit_table(plan, near=True)),
        ("what saves memory (estimates)", lever_table(plan)),
        (f"communication of rank {slowest.rank} in a step", ledger_table(slowest)),
        (f"time of rank {slowest.rank}", time_table(slowest)),
        ("search", search_table(plan.candidates)),
    ]
    for title, table in sections:
        if table.rows:
            lines += ["", _rule(title, width), *_aligned(table, width)]
    lines += _commands(plan)
    if plan.guesses:
        lines += ["", _rule("guessed", width)]
        lines += ["   The script read numbers of tensors that have none in a plan, and got substitutes:"]
        lines += [f"   {guess}" for guess in plan.guesses]
    lines += ["", _rule("what a plan cannot know", width)]
    for sentence in CANNOT_KNOW:
        lines += textwrap.wrap(sentence, width, initial_indent="   - ", subsequent_indent="     ")
    return "\n".join([*lines, "─" * width])


def _commands(plan: Plan) -> list[str]:
    best = [candidate for candidate in plan.candidates if candidate.fits and candidate.command][:_BEST]
    lines = []
    for number, candidate in enumerate(best, 1):
        lines += ["", f"   {number}. {candidate.command}"]
        lines += [f"      in the script: {change}" for change in candidate.changes]
    return lines


def _rule(title: str, width: int) -> str:
    begin = f"── {title} "
    return begin + "─" * (width - len(begin))


def _field(name: str, text: str, width: int) -> list[str]:
    indent = " " * (_NAME_WIDTH + 4)
    first = f"   {name:<{_NAME_WIDTH}} "
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=indent, break_long_words=False)


def _aligned(table: Table, width: int) -> list[str]:
    """Return the rows in columns; words of the last column continue below each other."""
    rows = [table.head, *table.rows]
    columns = len(table.head)
    widths = [max(len(row[column]) for row in rows) for column in range(columns)]
    left = [column < table.words or column in table.wide for column in range(columns)]
    before = 3 + sum(widths[:-1]) + 2 * (columns - 1)
    widths[-1] = min(widths[-1], max(20, width - before))
    lines = []
    for row in rows:
        parts = textwrap.wrap(row[-1], widths[-1], break_long_words=False, break_on_hyphens=False) or [""]
        cells = [
            cell.ljust(size) if words else cell.rjust(size)
            for cell, size, words in zip((*row[:-1], parts[0]), widths, left, strict=True)
        ]
        lines.append(("   " + "  ".join(cells)).rstrip())
        lines += [" " * before + part for part in parts[1:]]
    return lines
