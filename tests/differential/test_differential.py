"""The same script under accelerate 1.15 and under this library: a user sees no difference that is not in the docs."""

from __future__ import annotations

import fcntl
import json
import re
from pathlib import Path
from typing import Any

import pytest

from .known import KNOWN
from .registry import WORLDS, all_scripts
from .side_by_side import REFERENCE, ROOT, Observed, differences, disagreement, run_both

CASES = [(script.name, world) for script in all_scripts() for world in script.worlds]
needs_reference = pytest.mark.skipif(REFERENCE is None, reason="set MESHWRIGHT_REFERENCE_PYTHON to accelerate 1.15's")


@pytest.fixture(scope="session")
def observed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """Return a function that gives the records of a world; whichever pytest worker asks first runs the scripts."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if hasattr(request.config, "workerinput") else base
    records: dict[str, dict[str, Observed]] = {}

    def of(world: str) -> dict[str, Observed]:
        if world not in records:
            result = shared / f"differential-{world}.json"
            with (shared / f"differential-{world}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not result.exists():
                    both = run_both(world, shared / f"differential-{world}")
                    result.write_text(json.dumps(both), encoding="utf-8")
                records[world] = json.loads(result.read_text(encoding="utf-8"))
        return records[world]

    return of


@needs_reference
@pytest.mark.parametrize(("name", "world"), sorted(CASES, key=lambda case: list(WORLDS).index(case[1])))
def test_a_user_sees_no_difference_that_is_not_in_the_docs(name: str, world: str, observed: Any) -> None:
    both = observed(world)
    for who, records in both.items():
        assert name in records, f"{who}: a rank did not get to the end of {name}; see the output of the first test"
    found = differences(both["theirs"][name], both["ours"][name])
    known = [entry for entry in KNOWN if entry.concerns(name, world)]
    unknown = {what: where for what, where in found.items() if not any(entry.explains(what) for entry in known)}
    assert not unknown, "not in known.py:\n" + "\n".join(f"{what}: {where}" for what, where in unknown.items())
    gone = [entry for entry in known if not any(entry.explains(what) for what in found)]
    assert not gone, f"listed in known.py, and there is no such difference any more: {gone}"


def test_there_are_enough_scripts() -> None:
    assert len({name for name, _ in CASES}) >= 40


def test_every_known_difference_is_of_a_script_and_has_a_row_in_the_docs() -> None:
    table = (ROOT / "docs" / "differences.md").read_text(encoding="utf-8")
    rows = {row.split(" | ")[0].removeprefix("| ").strip() for row in table.splitlines() if row.startswith("| ")}
    assert {entry.row for entry in KNOWN} <= rows
    assert all(any(entry.concerns(name, world) for name, world in CASES) for entry in KNOWN)


def test_the_comparison_sees_what_differs() -> None:
    def places(theirs: Any, ours: Any) -> list[str]:
        return list(disagreement(theirs, ours))

    assert places({"a": [1, 2.0, "x", None]}, {"a": [1, 2.0 + 1e-9, "x", None]}) == []
    assert places([1.0, float("nan")], [1.0, float("nan")]) == []
    assert places([1, 2], [1, 3]) == ["[1]: theirs 2, ours 3"]
    assert places({"a": 1}, {"b": 1})
    assert places(1, 1.0)
    assert places([1], [1, 1])
    assert places(0.1, 0.1001)
    assert places(True, 1)
    record = {"observed": {"a": [1]}}
    assert differences([record], [{"raised": "ValueError", "from": "here"}]).keys() == {"raised"}
    assert differences([record, record], [record, {"observed": {"a": [2], "b": []}}]).keys() == {"a", "b"}
    assert differences([record], [record]) == {}


def test_no_script_looks_at_the_version() -> None:
    """A script that knew under which implementation it runs could hide a difference."""
    for path in (Path(__file__).parent / "scripts").glob("*.py"):
        assert not re.search(r"__version__|importlib\.metadata", path.read_text(encoding="utf-8")), path.name
