"""What the logs of a training say: when it stood still, and which samples were lost or computed twice."""

from __future__ import annotations

import json
import os
import statistics
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from .task import REPLICAS, SAMPLES, SHARE


@dataclass(frozen=True)
class Run:
    """The logs of all processes of a training, one list of lines for each, in the order in which they began."""

    logs: list[list[dict[str, Any]]]
    ends: dict[int, torch.Tensor]
    """The parameters at the end, by replica."""

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Read what there is until now."""
        logs = [
            [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
            for file in folder.glob("log_*")
        ]
        ends = {int(file.name.removeprefix("end_")): torch.load(file) for file in sorted(folder.glob("end_*"))}
        return cls(sorted(filter(None, logs), key=lambda log: log[0]["time"]), ends)

    @property
    def newest_step(self) -> int:
        """The last step that was made."""
        return max((log[-1].get("step", 0) for log in self.logs), default=0)

    def training(self) -> dict[int, int]:
        """Return the process of every replica that has made a step and is alive."""
        newest = {log[0]["replica"]: log for log in self.logs}
        return {
            replica: log[0]["pid"]
            for replica, log in newest.items()
            if len(log) > 1 and os.path.exists(f"/proc/{log[0]['pid']}")
        }

    def pids(self) -> list[int]:
        """Return the processes of replicas that are alive."""
        return list(self.training().values())

    def times(self) -> list[float]:
        """Return when each step was made for the first time."""
        first: dict[int, float] = {}
        for log in self.logs:
            for line in log[1:]:
                first[line["step"]] = min(line["time"], first.get(line["step"], line["time"]))
        return [first[step] for step in sorted(first)]

    def seconds(self) -> float:
        """Return the time from the first step to the last."""
        times = self.times()
        return times[-1] - times[0]

    def seconds_without_step(self) -> float:
        """Add up the times between two steps that took more than twice as long as usual, less a usual one."""
        times = self.times()
        gaps = [max(0.0, after - before) for before, after in pairwise(times)]
        usual = statistics.median(gaps)
        return sum(gap - usual for gap in gaps if gap > 2 * usual)

    def samples(self) -> Counter[tuple[int, int]]:
        """Count how often each sample of each epoch was computed for a step that was made."""
        return Counter(tuple(sample) for log in self.logs for line in log[1:] for sample in line["samples"])

    def difference(self, other: Run) -> float:
        """Return the largest difference of a parameter at the end, of any replica."""
        return max(float((end - other.ends[0]).abs().max()) for end in self.ends.values())


def row(contender: str, healthy: Run, killed: Run, steps: int) -> str:
    """Describe the losses of a contender as a row of the table."""
    planned = steps * REPLICAS * SHARE
    assert planned % SAMPLES == 0, "whole epochs"
    counted = killed.samples()
    spread = killed.difference(killed)
    cells = (
        contender,
        f"{killed.seconds_without_step():.1f} s ({healthy.seconds_without_step():.1f} s)",
        f"{killed.seconds() - healthy.seconds():.1f} s of {healthy.seconds():.0f} s",
        f"{planned - len(counted):,} of {planned:,}",
        f"{counted.total() - len(counted):,}",
        f"{killed.difference(healthy):.1e}",
        "none" if spread == 0 else f"{spread:.1e}",
    )
    return f"| {' | '.join(cells)} |"
