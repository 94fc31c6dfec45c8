"""Show a plan as one HTML page that needs no other file and no network."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from ..result import Plan, RankPlan
from .picture import legend, picture
from .tables import (
    CANNOT_KNOW,
    Table,
    facts,
    fit_table,
    kind_of,
    largest_table,
    ledger_table,
    lever_table,
    memory_table,
    moment_of,
    search_table,
    summary,
    time_table,
)

_BEST = 3
_TIGHT = "Tight: what is allocated fits, but not what the allocator would hold."


def as_page(plan: Plan, version: str) -> str:
    """Return the page of a plan."""
    style = (files(__package__) / "page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    title = escape(f"{plan.script} on {plan.cluster}")
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    made = f"meshwright {version}, {time.strftime('%Y-%m-%d %H:%M')}, planned in {plan.planned_in:.0f} s"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title} · plan</title>",
            f"<style>{style}</style></head><body><main>",
            f"<header><h1>{title}</h1><p class='muted'>{escape(made)}</p></header>",
            _answers(plan),
            *_pictures(plan),
            *_sections(plan),
            "</main></body></html>",
            "",
        ]
    )


def _answers(plan: Plan) -> str:
    first = plan.fits[0] if plan.fits else None
    rows = []
    for name, words in [*summary(plan), *facts(plan)]:
        kind = f' class="{kind_of(first.verdict)}"' if first is not None and name == first.device else ""
        rows.append(f"<dt>{escape(name)}</dt><dd{kind}>{escape(words)}</dd>")
    return f'<section class="card"><dl>{"".join(rows)}</dl></section>'


def _pictures(plan: Plan) -> list[str]:
    """Return a picture for the largest rank, and one for every other stage, which is closed."""
    others = {rank.stage: rank for rank in reversed(plan.ranks) if rank.stage != plan.largest.stage}
    return [
        _picture(plan, plan.largest, opened=True),
        *(_picture(plan, others[stage], opened=False) for stage in sorted(others)),
    ]


def _picture(plan: Plan, rank: RankPlan, opened: bool) -> str:
    fit = plan.fits[0] if plan.fits else None
    timeline = rank.memory.timeline
    drawn = picture(timeline, fit.capacity - fit.libraries if fit else None, fit.device if fit else "")
    note = "From left to right in the order in which the work is issued, not in time."
    if rank.memory.shape_of is not None:
        note += f" Drawn with {rank.memory.shape_of} repeated blocks, at the heights of {rank.memory.blocks}."
    title = f"Memory over a step, rank {rank.rank}" + (f", stage {rank.stage}" if plan.schedule else "")
    body = f"{legend(timeline)}{drawn}<p class='muted'>Peak: {escape(moment_of(rank))}. {escape(note)}</p>"
    return _section(title, body, opened)


def _sections(plan: Plan) -> list[str]:
    slowest = plan.slowest
    tables: Sequence[tuple[str, Table, str]] = (
        ("Memory per rank", memory_table(plan), ""),
        (f"Largest at the peak of rank {plan.largest.rank}", largest_table(plan.largest), ""),
        (
            "Devices",
            fit_table(plan, near=True),
            _TIGHT,
        ),
        (
            "What saves memory",
            lever_table(plan, prices=True),
            "Estimates, each for itself. Plan with the setting to know.",
        ),
        (f"Communication of rank {slowest.rank} in a step", ledger_table(slowest), ""),
        (f"Time of rank {slowest.rank}", time_table(slowest), "Operations by their roofline."),
        ("Search", search_table(plan.candidates), ""),
    )
    parts = [
        _section(title, _table(table) + (f"<p class='muted'>{escape(note)}</p>" if note else ""))
        for title, table, note in tables
        if table.rows
    ]
    best = [candidate for candidate in plan.candidates if candidate.fits and candidate.command][:_BEST]
    for number, candidate in enumerate(best, 1):
        changes = "".join(f"<p>In the script: {escape(change)}</p>" for change in candidate.changes)
        yaml = f"<pre>{escape(candidate.yaml)}</pre>" if candidate.yaml else ""
        parts.append(_section(f"{number}. of the search", f"<pre>{escape(candidate.command)}</pre>{changes}{yaml}"))
    if len(plan.fits) > len(fit_table(plan, near=True).rows):
        parts.append(_section("All devices", _table(fit_table(plan)), opened=False))
    if plan.guesses:
        parts.append(_section("Guessed numbers", _listed(plan.guesses)))
    return [*parts, _section("What a plan cannot know", _listed(CANNOT_KNOW))]


def _section(title: str, body: str, opened: bool = True) -> str:
    state = " open" if opened else ""
    return f'<details class="card"{state}><summary>{escape(title)}</summary><div class="scroll">{body}</div></details>'


def _listed(words: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(each)}</li>' for each in words)}</ul>"


def _table(table: Table) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{_class(table, column)}>{_words(cell) if column in table.wide else escape(cell.strip())}</{tag}>"
            for column, cell in enumerate(row)
        )

    rows = [f"<tr{_marked(table, number)}>{cells(row, 'td')}</tr>" for number, row in enumerate(table.rows)]
    return f"<table><thead><tr>{cells(table.head, 'th')}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _words(text: str) -> str:
    """Return text that breaks between words only: a flag stays whole."""
    return " ".join(f'<span class="word">{escape(word)}</span>' for word in text.split())


def _class(table: Table, column: int) -> str:
    names = [
        *(["wide"] if column in table.wide else ["number"] if column >= table.words else []),
        *(["verdict"] if table.head[column] in ("verdict", "margin") else []),
    ]
    return f' class="{" ".join(names)}"' if names else ""


def _marked(table: Table, row: int) -> str:
    return f' class="{table.marks[row]}"' if row in table.marks else ""
