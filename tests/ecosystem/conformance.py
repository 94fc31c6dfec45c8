"""Make docs/conformance.md of what the last runs found, in any venv: `python -m tests.ecosystem.conformance`.

`published_tests` and `published_scripts` record what they find. Only the reasons are written by hand.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from tests.ecosystem import published_scripts, published_tests

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "conformance.md"


def make_page() -> str:
    """Return the page."""
    return "\n\n".join([HEAD, *tests(), *scripts(), *libraries()]) + "\n"


HEAD = """# Conformance

This page says what runs as it does under accelerate 1.15: its own tests, published training scripts, and the libraries
that the gate uses. `.ci/nightly conformance scripts` measures it and writes this page. Only the reasons are written
by hand."""


def tests() -> list[str]:
    """Return the part on accelerate's own tests and scripts."""
    rows, reasons = published_tests.read_found(), published_tests.read_reasons()
    failed = published_tests.fails_here(rows)
    files: dict[str, Counter[str]] = {}
    for test, (here, there) in rows.items():
        result = here if here in ("passed", "skipped") else "failed" if there == "passed" else "fails there"
        files.setdefault(file_of(test), Counter())[result] += 1
    whole = sum(files.values(), Counter[str]())
    columns = ("passed", "failed", "skipped", "fails there")
    kinds = Counter(published_tests.reason_of(test, reasons)[0] for test in failed)
    return [
        "## Accelerate's own tests",
        f"The tests and test scripts of the sdist of accelerate {published_tests.VERSION} run on this package. Of the "
        f"{whole['passed'] + whole['failed']} that pass here or under {published_tests.VERSION}, **{whole['passed']} "
        "pass here**. The machine has no accelerator and no network: what needs one is skipped, or fails under both.",
        table(
            ("file", "passes here", "fails here only", "skipped", "fails under both"),
            [(f"`{name}`", *(found[column] for column in columns)) for name, found in sorted(files.items())]
            + [("all", *(whole[column] for column in columns))],
        ),
        "### What fails here",
        ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items())) + ".",
        table(
            ("test", "kind", "reason"),
            [(f"`{short(test)}`", *published_tests.reason_of(test, reasons)) for test in sorted(failed)],
        ),
    ]


def file_of(test: str) -> str:
    """Return the file of a test, as the sdist names it."""
    if test.startswith("scripts/"):
        return "test_utils/" + test.partition(" on ")[0]
    found = re.match(r"tests\.(\w+)", test)
    return f"tests/{found[1]}.py" if found else test


def short(test: str) -> str:
    """Return a test without its folder."""
    return test.removeprefix("tests.")


def scripts() -> list[str]:
    """Return the part on published training scripts."""
    found, reasons = published_scripts.read_found(), published_scripts.read_reasons()
    runs = [result for _, result in found.values()]
    rows = []
    for name in dict.fromkeys(name for name, _ in found):
        sizes = [found.get((name, size), ("", "not run")) for size in (1, 2)]
        steps = next((steps for steps, _ in sizes if steps), "")
        told = dict.fromkeys(reasons[name, size] for size in (1, 2) if (name, size) in reasons)
        rows.append(
            (
                f"`{name}`",
                published_scripts.SCRIPTS[name].library,
                steps,
                *(result for _, result in sizes),
                "; ".join(told),
            )
        )
    return [
        "## Published training scripts",
        "Each script runs unmodified under accelerate 1.15 and under this package, on one process and on two, with the "
        "order of samples of 1.x (`--data_order accelerate-1`). Equal means: every loss, the parameters after every "
        "step and everything that is measured have the same bits. "
        f"{runs.count('equal')} of {len(runs)} runs are equal.",
        table(("script", "of", "steps", "1 process", "2 processes", "reason"), rows),
    ]


def libraries() -> list[str]:
    """Return the part on the versions of libraries."""
    pins = (REPOSITORY / ".ci" / "libraries.txt").read_text(encoding="utf-8").splitlines()
    torch = (REPOSITORY / ".ci" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wanted = [line.split("==") for line in [*torch, *pins] if re.fullmatch(r"[\w-]+==\S+", line)]
    return [
        "## Libraries",
        "The gate tests against these versions; `.ci/nightly newest` takes the newest of each.",
        table(("library", "version"), [(name, version) for name, version in wanted]),
    ]


def table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    """Return a table in Markdown; a column of numbers is aligned to the right."""
    numbers = [bool(rows) and all(isinstance(row[column], int) for row in rows) for column in range(len(head))]
    lines = [head, tuple("---:" if number else "---" for number in numbers), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
