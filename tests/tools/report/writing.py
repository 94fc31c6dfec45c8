"""Write the files that the JSON-lines tracker writes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

START = 1_763_190_000.0


def start(project: str = "digits", time: float = START, **more: Any) -> dict[str, Any]:
    return {"start": {"time": time, "project": project, "run": "run", **more}}


def values(step: int, time: float | None = None, **logged: Any) -> dict[str, Any]:
    return {"step": step, "time": START + step if time is None else time, "values": logged}


def end(time: float = START + 1000) -> dict[str, Any]:
    return {"end": {"time": time}}


def write_run(folder: Path, *records: Mapping[str, Any], tail: str = "") -> Path:
    """Write a run and return its folder; `tail` follows the last line as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text(lines(records) + tail, encoding="utf-8")
    return folder


def append(folder: Path, *records: Mapping[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(lines(records))


def lines(records: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def write_loss(folder: Path, steps: int = 20, *, ended: bool = True, project: str = "digits") -> Path:
    """Write a run whose loss falls."""
    logged = [values(step, loss=1 / (1 + step)) for step in range(steps)]
    return write_run(folder, start(project), {"config": {"lr": 0.1}}, *logged, *([end(START + steps)] * ended))


def _change(number: int, second: float, kind: str, rank: int, reason: str, replicas: int) -> dict[str, Any]:
    event = {"time": START + second, "event": number, "kind": kind, "ranks": [rank], "reason": reason}
    return {**event, "replicas": replicas, "of": 4}


LEFT_AND_JOINED: list[dict[str, Any]] = [
    _change(1, 4.5, "left", 2, "rank 2 was killed by SIGKILL", 3),
    {"event": 1, "seconds": 0.21},
    {"total": {"time": START + 5, "replacements": 1, "seconds": 0.21, "of_seconds": 60.0}},
    _change(2, 12.5, "joined", 2, "", 4),
    {"event": 2, "seconds": 0.18},
    _change(3, 15.5, "left", 1, "no heartbeat for 15 s", 3),
    {"total": {"time": START + 16, "replacements": 2, "seconds": 0.39, "of_seconds": 144.0}},
]
"""The lines of `replicas.jsonl` of a run of about twenty seconds, as the launcher writes them."""
