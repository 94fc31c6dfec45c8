"""Write the parts of pages that are made from the code: `python docs/site_tables.py`.

A part stands between `<!-- made: NAME -->` and `<!-- end -->`. The site is built with fresh ones; the committed ones
are for readers of the repository, and a test compares them.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
SOURCES = DOCS.parent / "src"
if str(SOURCES) not in sys.path:
    sys.path.insert(0, str(SOURCES))

from meshwright.commands.launch import launch_command_parser  # noqa: E402
from meshwright.config.combinations import Feature, refused_pairs  # noqa: E402
from meshwright.config.launch.options import BY_NAME, Option  # noqa: E402
from meshwright.launch.processes import verdict as launcher  # noqa: E402
from meshwright.runtime import phases  # noqa: E402
from meshwright.watch.hangs.verdict import Absence, judge  # noqa: E402
from meshwright.watch.place import BACKWARD, COLLECTIVE, DATA, DEBUGGER, Place  # noqa: E402
from meshwright.watch.reports import ProcessReport  # noqa: E402
from meshwright.watch.stragglers.detection import SlowRank  # noqa: E402

_PART = re.compile(
    r"(?P<begin><!-- made: (?P<name>[\w ]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL
)


def filled(markdown: str) -> str:
    """Return a page with its made parts as the code says them now."""
    return _PART.sub(
        lambda part: (
            f"{part['begin']}\n{PARTS[part['name']]().strip()}\n\n{part['end']}"
        ),
        markdown,
    )


# --- the options of a launch ------------------------------------------------------------------------------------------


def launch_options() -> str:
    """Return a table per group of the parser."""
    parser = launch_command_parser()
    groups = [
        (group.title or "", group._group_actions) for group in parser._action_groups
    ]
    return "\n\n".join(
        _table_of_options(title, actions)
        for title, actions in groups
        if _shown(actions)
    )


def _shown(actions: Iterable[argparse.Action]) -> list[argparse.Action]:
    return [
        action
        for action in actions
        if action.help is not argparse.SUPPRESS and action.dest != "help"
    ]


def _table_of_options(title: str, actions: Iterable[argparse.Action]) -> str:
    rows = [_row(action, BY_NAME.get(action.dest)) for action in _shown(actions)]
    head = [
        "| flag | what | default | YAML key, variable |",
        "| --- | --- | --- | --- |",
    ]
    return f"## {title[:1].upper()}{title[1:]}\n\n" + "\n".join([*head, *rows])


def _row(action: argparse.Action, option: Option | None) -> str:
    flags = [
        flag for flag in action.option_strings if "_" in flag or "-" not in flag[2:]
    ] or [str(action.metavar)]
    word = f" {action.metavar}" if action.metavar and action.option_strings else ""
    what = (action.help or "").replace("%%", "%")
    if action.choices:
        what += ": " + ", ".join(f"`{choice}`" for choice in action.choices)
    has_default = (
        bool(action.option_strings)
        and action.default is not False
        and action.default not in (None, "", argparse.SUPPRESS)
    )
    default = f"`{action.default}`" if has_default else ""
    keys = (
        []
        if option is None
        else [f"`{key}`" for key in (option.yaml, option.variable) if key]
    )
    flag = ", ".join(f"`{flag}{word}`" for flag in flags)
    return (
        "| "
        + " | ".join(_cell(cell) for cell in (flag, what, default, ", ".join(keys)))
        + " |"
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# --- what the watcher says --------------------------------------------------------------------------------------------

_GUARD = "`if accelerator.is_main_process:` (line 87)"
_Situation = tuple[str, str, Callable[[], str]]


def _at(rank: int, call: str, line: int, **facts: Any) -> ProcessReport:
    """Return the report of a rank that has stood at a line of train.py for 30 seconds."""
    phase = facts.pop("phase", COLLECTIVE)
    operation = facts.pop(
        "operation", "all_reduce(float32[1])" if phase == COLLECTIVE else ""
    )
    place = Place(
        phase,
        f"{call}()",
        operation,
        "train.py",
        line,
        f"accelerator.{call}(...)",
        facts.pop("guard", ""),
    )
    return ProcessReport(
        rank, place, stalled_seconds=30, idle_seconds=facts.pop("idle", 30), **facts
    )


def _said(*reports: ProcessReport, absent: dict[int, str] | None = None) -> str:
    gone = {
        rank: Absence(how, not how.startswith(("is stopped", "does not")))
        for rank, how in (absent or {}).items()
    }
    return judge({report.rank: report for report in reports}, gone, 30).text


def _in_backward(rank: int, **facts: Any) -> ProcessReport:
    return _at(rank, "backward", 80, phase=BACKWARD, **facts)


def _in_gather(rank: int, size: int = 4, **facts: Any) -> ProcessReport:
    return _at(
        rank,
        "gather",
        88,
        operation=f"all_gather_into_tensor(float32[{size}])",
        **facts,
    )


FATAL: list[_Situation] = [
    (
        "A call stands inside a condition on the rank",
        "Move the call out of the condition. Only what no other rank takes part in (printing, writing a file) belongs "
        "inside.",
        lambda: _said(_in_gather(0, guard=_GUARD), _in_backward(1), _in_backward(2)),
    ),
    (
        "Ranks are in different calls",
        "Compare the two lines. A branch on the data, a `break`, or an exception that was caught took one rank "
        "another way.",
        lambda: _said(_in_gather(0), _in_backward(1), _in_backward(2)),
    ),
    (
        "Ranks bring different shapes",
        "Pad before the call, or gather as objects.",
        lambda: _said(_in_gather(0), _in_gather(1), _in_gather(2, size=3)),
    ),
    (
        "A rank has left the loop, and the others still train",
        "Hand the loader to `prepare`, or let all ranks leave together.",
        lambda: _said(
            _in_backward(0), absent={1: "has left: sys.exit(0) at train.py:12"}
        ),
    ),
    (
        "A rank has left, and the others call something that it does not",
        "The call is the last one of the script and stands in a condition: move it out.",
        lambda: _said(
            _in_gather(0, guard=_GUARD), absent={1: "has left: the script has ended"}
        ),
    ),
    (
        "A rank has left the script early",
        "End the script on all ranks, or on none.",
        lambda: _said(
            _in_gather(0), absent={1: "has left: sys.exit(0) at train.py:12"}
        ),
    ),
    (
        "A rank has failed",
        "Correct that error. Those who wait have nothing wrong with them.",
        lambda: _said(
            _in_backward(0),
            absent={1: "has failed: ValueError: bad sample (train.py:40: `decode(x)`)"},
        ),
    ),
    (
        "A rank is dead",
        "Look for who killed it: the kernel's log (`dmesg`), the batch system, the panel of the launcher.",
        lambda: _said(_in_backward(0), absent={1: "is dead (process 4711)"}),
    ),
    (
        "A connection is closed, and one rank does not answer",
        "Look at that rank's machine and at the network between the two.",
        lambda: _said(
            _in_gather(0, lost_peer=True),
            absent={1: "does not answer (process 4711 on node-b)"},
        ),
    ),
    (
        "A lock and a collective wait for each other",
        "Release the lock before the collective. Look for a callback or a thread that also communicates.",
        lambda: _said(_in_gather(0), _at(1, "acquire", 51, phase=DATA, at_lock=True)),
    ),
]

NOTICES: list[_Situation] = [
    (
        "A rank is busy",
        "Nothing, if the work is meant to take so long. Work that only the main process does goes into "
        "`main_process_first()`, which trips no timeout.",
        lambda: _said(_in_gather(0), _at(1, "tokenize", 20, phase=DATA, idle=0)),
    ),
    (
        "A rank is in a debugger",
        "Continue it there.",
        lambda: _said(_in_gather(0), _at(1, "breakpoint", 33, phase=DEBUGGER)),
    ),
    (
        "A process was stopped, or does not answer",
        "`kill -CONT` lets a stopped process go on. A process on another machine may be busy, or unreachable.",
        lambda: _said(
            _in_gather(0),
            absent={1: "is stopped (process 4711: SIGSTOP or a debugger)"},
        ),
    ),
    (
        "All ranks are in the same call",
        "Look at the network: interface (`GLOO_SOCKET_IFNAME`, `NCCL_SOCKET_IFNAME`), firewall, cables. `meshwright "
        "test` tries it without your script.",
        lambda: _said(_in_gather(0), _in_gather(1)),
    ),
    (
        "The ranks are in different calls, and nobody is blamed",
        "If it stays so, compare the lines: the calls belong to different process groups, or a broadcast that some "
        "ranks have left.",
        lambda: _said(
            _in_gather(0, outstanding="1:4"), _at(1, "reduce", 91, outstanding="0:9")
        ),
    ),
    (
        "A rank is slow",
        "Look at that rank in the phase that is named: its disk and data workers for data, its device and other "
        "programs for the rest. `meshwright watch` shows all ranks.",
        lambda: str(
            SlowRank(rank=2, phase=phases.DATA, seconds=0.13, usual=0.1, cost=0.23)
        ),
    ),
]


def fatal_verdicts() -> str:
    """Return what ends a run."""
    return "\n\n".join(_situation(*each) for each in FATAL)


def notices() -> str:
    """Return what is said while a run waits on."""
    return "\n\n".join(_situation(*each) for each in NOTICES)


def _situation(title: str, remedy: str, say: Callable[[], str]) -> str:
    sentence = say().splitlines()[0]
    return f"### {title}\n\n> {sentence}\n\n**What to do:** {remedy}"


# --- what the launcher advises ----------------------------------------------------------------------------------------


def signals() -> str:
    """Return a row for every signal that ends a rank."""
    rows = [
        (f"`{name}`" + (", and the kernel ran out of memory" if why else ""), advice)
        for why, table in launcher._REMEDY_FOR_SIGNALS.items()
        for name, advice in table.items()
    ]
    return _table("killed by", "try", rows)


def errors_of_scripts() -> str:
    """Return a row for every error that the launcher knows a remedy for."""
    rows = [
        (", ".join(f"`{word}`" for word in _alternatives(known)), advice)
        for known, advice in launcher._REMEDIES
    ]
    return _table("the error has", "try", rows)


def _alternatives(pattern: str) -> list[str]:
    """Return what a pattern stands for, as people read it."""
    words, depth = [""], 0
    for char in pattern:
        depth += (char == "(") - (char == ")")
        if char == "|" and depth == 0:
            words.append("")
        else:
            words[-1] += char
    return [
        word.replace(".*", " … ")
        .replace("|", " or ")
        .replace("(", "")
        .replace(")", "")
        .strip()
        for word in words
    ]


def _table(left: str, right: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = [
        f"| {left} | {right} |",
        "| --- | --- |",
        *(f"| {_cell(a)} | {_cell(b)} |" for a, b in rows),
    ]
    return "\n".join(lines)


# --- exceptions -------------------------------------------------------------------------------------------------------


def exceptions() -> Iterator[tuple[str, str, str]]:
    """Yield module, name and docstring of every exception and warning of the package."""
    for file in sorted((SOURCES / "meshwright").rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and re.fullmatch(
                r"[A-Z]\w*(Error|Exception|Warning)", node.name
            ):
                module = ".".join(
                    file.relative_to(SOURCES).with_suffix("").parts
                ).removesuffix(".__init__")
                yield module, node.name, ast.get_docstring(node) or ""


def error_classes() -> str:
    """Return an entry for every exception."""
    entries = sorted(
        exceptions(), key=lambda each: (each[0] != "meshwright.errors", each[1])
    )
    return "\n\n".join(
        f"### `{name}`\n\n`{module}.{name}`. {text}" for module, name, text in entries
    )


# --- what goes with what ----------------------------------------------------------------------------------------------

_IN_PAIRS = (
    Feature.FSDP, Feature.DEEPSPEED, Feature.DP_SHARD, Feature.TP, Feature.CP, Feature.SP, Feature.PP, Feature.EP,
    Feature.OFFLOAD, Feature.FP16, Feature.FP8, Feature.COMPILE, Feature.XLA, Feature.SURVIVE, Feature.MEMORY_COPIES,
)  # fmt: skip


def combinations() -> str:
    """Return a table of the main features in pairs: a dot where they go together."""
    refused = {frozenset(pair[:2]) for pair in refused_pairs()}
    one_of = {Feature.FP16, Feature.FP8}

    def cell(row: Feature, column: Feature) -> str:
        if row is column or {row, column} == one_of:
            return ""
        return "no" if frozenset((row, column)) in refused else "·"

    columns = [feature.value.removesuffix("_size") for feature in _IN_PAIRS]
    lines = [f"| | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
    for row in _IN_PAIRS:
        cells = [cell(row, column) for column in _IN_PAIRS]
        lines.append(f"| `{row.value}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def refused_combinations() -> str:
    """Return a table of all pairs that are refused, with the reason and what to do."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for feature, other, row in refused_pairs():
        others = rows.setdefault((feature.value, row.reason, row.remedy), [])
        others.append(f"`{other.value}`")
    lines = ["| setting | with | why not | instead |", "| --- | --- | --- | --- |"]
    lines += [
        f"| `{name}` | {', '.join(others)} | {reason} | {remedy} |"
        for (name, reason, remedy), others in rows.items()
    ]
    return "\n".join(lines)


PARTS: dict[str, Callable[[], str]] = {
    "combinations": combinations,
    "refused combinations": refused_combinations,
    "launch options": launch_options,
    "fatal verdicts": fatal_verdicts,
    "notices": notices,
    "signals": signals,
    "errors of scripts": errors_of_scripts,
    "error classes": error_classes,
}


if __name__ == "__main__":
    for page in sorted(DOCS.glob("*.md")):
        before = page.read_text(encoding="utf-8")
        if (after := filled(before)) != before:
            page.write_text(after, encoding="utf-8")
            print(f"wrote {page.name}")
