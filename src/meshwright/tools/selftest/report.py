"""The file that `meshwright test --report` writes: what this machine is, and what every check found.

It is Markdown, to be attached to an issue, and holds nothing private: see `scrub`.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...program import program_name

_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b|(?<![\w:])[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}(?![\w:])")
_PATH = re.compile(r"(?<![\w./])~?(?:/[^\s/:,;'\"()|]+)+/([^\s/:,;'\"()|]+)")
PANEL = "── the run failed"
"""What the launcher's panel begins with; the tracebacks before it say the same."""


@dataclass(frozen=True)
class Drill:
    """A fault that was made on purpose, and how the run ended."""

    passed: bool
    seconds: float
    text: str
    """One line."""
    printed: str
    """What the launcher printed."""


def scrub(text: str, hosts: Iterable[str] = ()) -> str:
    """Replace host names and addresses, and of every path keep the file's name."""
    names = {name for name in (*hosts, socket.gethostname(), socket.getfqdn()) if len(name) > 1 and name != "localhost"}
    for name in sorted(names, key=len, reverse=True):
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "<host>", text)
    text = _ADDRESS.sub(lambda found: "<address>" if _is_address(found[0]) else found[0], text)
    return _PATH.sub(r"…/\1", text)


def _is_address(text: str) -> bool:
    try:
        return not ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False


def as_markdown(environment: str, outcomes: Mapping[str, Any] | None, drill: Drill | None) -> str:
    """Return the report; there are no outcomes if the processes did not get so far."""
    sections = [
        f"# Report of `{program_name()} test`",
        _summary(outcomes, drill),
        "## Environment",
        f"```text\n{environment}\n```",
    ]
    if outcomes is not None:
        sections += ["## Checks", _table(outcomes["checks"]), *_reasons(outcomes["checks"])]
        sections += ["## Measurements", _table(outcomes["measurements"])]
    if drill is not None:
        printed = drill.printed[max(0, drill.printed.find(PANEL)) :] if drill.passed else drill.printed
        sections += ["## Hang drill", drill.text, f"```text\n{printed.strip()}\n```"]
    hosts = outcomes["hosts"] if outcomes is not None else ()
    return scrub("\n\n".join(sections), hosts) + "\n"


def _summary(outcomes: Mapping[str, Any] | None, drill: Drill | None) -> str:
    if outcomes is None:
        return "**Failed**: the processes did not run the checks. What they printed is on the terminal, not here."
    checks = outcomes["checks"]
    failed = [name for name, found in checks.items() if not _passed(found)]
    failed += ["hang drill"] if drill is not None and not drill.passed else []
    verdict = (
        f"**Failed**: {', '.join(failed)}." if failed else f"**Passed**: {len(checks) + (drill is not None)} checks."
    )
    if outcomes["num_not_run"]:
        verdict += f" {outcomes['num_not_run']} checks were not run, because a rank hung."
    where = f"{outcomes['processes']} process(es) on {len(set(outcomes['hosts']))} machine(s), {outcomes['device']}"
    return f"{verdict} {where}, {outcomes['settings']}, {outcomes['seconds']:.0f} s."


def _passed(found: list[dict[str, Any]]) -> bool:
    return all(outcome["passed"] for outcome in found)


def _table(rows: Mapping[str, list[dict[str, Any]]]) -> str:
    lines = ["| what | result | seconds | found |", "| --- | --- | --- | --- |"]
    for name, found in rows.items():
        failed = [str(outcome["rank"]) for outcome in found if not outcome["passed"]]
        result = f"failed on rank {', '.join(failed)}" if failed else "passed"
        text = "" if failed else found[0]["text"].replace("|", "\\|")
        lines.append(f"| {name} | {result} | {max(outcome['seconds'] for outcome in found):.2f} | {text} |")
    return "\n".join(lines)


def _reasons(checks: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """Return the reasons of failures, the earliest first: it explains the others."""
    failures = [(name, outcome) for name, found in checks.items() for outcome in found if not outcome["passed"]]
    failures.sort(key=lambda failure: failure[1]["ended"])
    lines = [f"- {name}, rank {outcome['rank']}: {outcome['text']}" for name, outcome in failures]
    return ["\n".join(lines)] if lines else []
