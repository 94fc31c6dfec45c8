"""A training step that logs, and one that does not: trackers that work, block, fail or meet a full disk."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.optim import SGD

from meshwright import Accelerator, tracking

from .interleave import Comparison, compare, timed
from .task import loader, loss_of, model

SECONDS_BLOCKED = 5.0


class Scripted(tracking.GeneralTracker):
    """A tracker that does something else than its work."""

    name = "scripted"
    requires_logging_directory = False
    tracker = None

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.act = act

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Do something else."""
        self.act()


def run(rounds: int) -> list[Comparison]:
    """Measure a step with each tracker against the same step without."""
    torch.set_num_threads(1)
    with _failures_expected():
        return rows(rounds)


@contextmanager
def _failures_expected() -> Iterator[None]:
    """Do not wait for the tracker that blocks, nor hear of those that fail; afterwards all is as before."""
    from meshwright.tracking import writer

    log = logging.getLogger("meshwright.tracking")
    before = writer.SECONDS_TO_FINISH, log.level
    writer.SECONDS_TO_FINISH = 0.1
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        writer.SECONDS_TO_FINISH = before[0]
        log.setLevel(before[1])


def rows(rounds: int) -> list[Comparison]:
    def row(what: str, tracker: Callable[[], Any], target: float | None) -> Comparison:
        return compare(
            f"step that logs its loss / step that does not: {what}",
            lambda: timed(steps(None)),
            lambda: timed(steps(tracker())),
            rounds=rounds,
            target=target,
        )

    return [
        row("control, no tracker", lambda: None, None),
        row("a tracker that does nothing", lambda: Scripted(lambda: None), None),
        row("jsonl", lambda: "jsonl", None),
        row("a tracker that raises", lambda: Scripted(_raise), 1.05),
        row(f"a tracker that blocks {SECONDS_BLOCKED:.0f} s", lambda: Scripted(_block), 1.05),
        row("jsonl on a full disk", lambda: "full", 1.05),
    ]


def steps(tracker: Any) -> Iterator[None]:
    """Train through the library, and log every loss."""
    net = model()
    with TemporaryDirectory() as folder:
        accelerator = Accelerator(cpu=True, log_with="jsonl" if tracker == "full" else tracker, project_dir=folder)
        accelerator.init_trackers("benchmark")
        if tracker == "full":
            os.dup2(os.open("/dev/full", os.O_WRONLY), accelerator.get_tracker("jsonl")._file)
        net, optimizer, batches = accelerator.prepare(net, SGD(net.parameters(), lr=1e-3), loader())
        try:
            step = 0
            while True:
                for inputs, labels in batches:
                    loss = loss_of(net(inputs), labels)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    accelerator.log({"loss": loss, "step": step}, step=step)
                    step += 1
                    yield
        finally:
            accelerator.end_training()


def _raise() -> None:
    raise ConnectionError("no route to host")


def _block() -> None:
    time.sleep(SECONDS_BLOCKED)
