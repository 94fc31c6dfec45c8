"""Reading `replicas.jsonl`: who left, why, what it cost, who joined."""

from __future__ import annotations

from pathlib import Path

from meshwright.tools.report.runs.replicas import read_changes
from tests.tools.report.writing import LEFT_AND_JOINED, lines


def test_costs_and_absences_belong_to_their_changes(tmp_path: Path) -> None:
    (tmp_path / "replicas.jsonl").write_text(lines(LEFT_AND_JOINED) + '{"event": 2, "sec')
    found = read_changes(tmp_path / "metrics.jsonl")
    assert found is not None
    assert [(change.text, change.seconds, change.replicas) for change in found.changes] == [
        ("rank 2 was killed by SIGKILL", 0.21, 3),
        ("rank 2 joined after 8.0 s", 0.18, 4),
        ("rank 1 left: no heartbeat for 15 s", None, 3),
    ]
    assert found.total == "2 replacements, 0.4 s lost of 2.4 min"
    assert found.present == "3 of 4 replicas"


def test_a_run_that_lost_nobody_has_no_changes(tmp_path: Path) -> None:
    assert read_changes(tmp_path / "metrics.jsonl") is None
    (tmp_path / "replicas.jsonl").write_text("no json\n")
    assert read_changes(tmp_path / "metrics.jsonl") is None


def test_numbers_of_a_second_attempt_belong_to_its_own_events(tmp_path: Path) -> None:
    again = {**LEFT_AND_JOINED[0], "ranks": [3], "reason": "rank 3 was killed by SIGKILL"}
    (tmp_path / "replicas.jsonl").write_text(lines([*LEFT_AND_JOINED, again, {"event": 1, "seconds": 9.0}]))
    found = read_changes(tmp_path / "metrics.jsonl")
    assert found is not None
    assert [change.seconds for change in found.changes] == [0.21, 0.18, None, 9.0]
