"""Log what users log by mistake or by habit, without steps, to the trackers named on the command line."""

from __future__ import annotations

import json
import logging
import math
import sys
from pathlib import Path
from typing import Any

import torch

from meshwright import Accelerator
from tests.tracking.stores.script import OPTIONS

LONG = "x" * 9000
CONFIG = {"long": LONG, "function": max, "set": {2, 1}, **{f"parameter_{index}": index for index in range(250)}}
RECORDS: list[dict[str, Any]] = [
    {"ok": 0, "nan": math.nan, "inf": math.inf},
    {"ok": 1, "chart": {"a": 1, "b": 2.5}},
    {"ok": 2, "thing": object(), "many": torch.arange(3)},
    {"ok": 3, "thing": object(), "many": torch.arange(3)},
    {"ok": 4, "top-5 accuracy (%)": 0.5},
]


class Warnings(logging.Handler):
    """Collect log messages."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self.messages.append(record.getMessage())


def main(names: list[str]) -> None:
    """Log the odd values; a task of ClearML and a `Live` of DVCLive are there before."""
    warnings = Warnings()
    logging.getLogger("meshwright").addHandler(warnings)
    options: dict[str, dict[str, Any]] = {name: OPTIONS.get(name, {}) for name in names}
    task: Any = None
    if "clearml" in names:
        from clearml import Task

        task = Task.init("mine", "opened before", **options["clearml"])
    if "dvclive" in names:
        from dvclive import Live

        options["dvclive"] = {"live": Live(**options["dvclive"])}
    accelerator = Accelerator(log_with=names, project_dir="runs")
    accelerator.init_trackers("shapes", config=CONFIG, init_kwargs=options)
    for record in RECORDS:
        accelerator.log(record)
    if "dvclive" in names:
        assert accelerator.get_tracker("dvclive", unwrap=True) is options["dvclive"]["live"]
    if "clearml" in names:
        assert accelerator.get_tracker("clearml", unwrap=True) is task
    trackers = accelerator.trackers
    accelerator.end_training()
    for tracker in trackers:
        tracker.finish()
    if "clearml" in names:
        task.get_logger().report_scalar("after", "after", 1, 1)
        task.close()
    Path("warnings.json").write_text(json.dumps(warnings.messages))


if __name__ == "__main__":
    main(sys.argv[1:])
