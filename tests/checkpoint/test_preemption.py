"""A preempted run saves at one step on all ranks, exits with 75, and resumes from there."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright import Accelerator
from meshwright.checkpoint import preemption as preemption_module
from meshwright.checkpoint.group import CheckpointGroup
from meshwright.checkpoint.preemption import MOST_CALLS_BETWEEN_CHECKS, Preemption
from tests.launching import run_accelerate, start_accelerate
from tests.ranks import run_on_ranks


def ask_often() -> tuple[list[int], int]:
    """Count the calls at which the ranks ask each other, and tell at which one they agree to stop."""
    accelerator = Accelerator(cpu=True)
    preemption, group = Preemption(None), CheckpointGroup.of_all_ranks(accelerator.state._runtime, on_each_node=False)
    asked: list[int] = []
    for call in range(200):
        if call == 100 and accelerator.process_index == 1:
            preemption.reason = "SIGTERM"
        if call < 60:
            time.sleep(0.001 * accelerator.process_index)

        def gather(item: Any, call: int = call) -> list[Any]:
            asked.append(call)
            return group.gather(item)

        if preemption.agreed(gather) is not None:
            return asked, call
    raise AssertionError("the ranks never stopped")


def test_ranks_that_step_fast_ask_each_other_rarely_and_stop_at_the_same_step() -> None:
    first, second = run_on_ranks(2, ask_often)
    assert first == second
    asked, stopped = first
    assert 100 <= stopped < 100 + MOST_CALLS_BETWEEN_CHECKS
    assert len(asked) <= 3 + 100 // MOST_CALLS_BETWEEN_CHECKS + 1


def test_ranks_that_step_slowly_ask_each_other_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(0, 1000, 3))
    monkeypatch.setattr(preemption_module.time, "monotonic", lambda: next(seconds))
    preemption = Preemption(None)
    asked = []
    for call in range(5):
        assert preemption.agreed(lambda item, call=call: asked.append(call) or [item]) is None
    assert asked == [0, 1, 2, 3, 4]


SCRIPT = """
import os, time
import torch
from torch.utils.data import DataLoader
from meshwright import Accelerator
from meshwright import ProjectConfiguration

accelerator = Accelerator(project_config=ProjectConfiguration(project_dir="run", automatic_checkpoint_naming=True))
model, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(torch.arange(200.0), batch_size=1))
resumed = accelerator.resume() is not None
for batch in loader:
    print(int(batch), flush=True)
    open(f"seen_{int(batch)}", "w").close()
    if not resumed:
        time.sleep(0.1)
    accelerator.save_if_preempted()
"""


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("way", ["signal", "file"])
def test_a_preempted_run_saves_and_the_next_start_resumes(way: str, processes: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("launch", "--cpu", "--num_processes", processes, "--max_restarts", 1 if processes == 2 else 0, "train.py")
    process = start_accelerate(*words, directory=tmp_path)
    wait_for(tmp_path / "seen_5")
    if way == "signal":
        process.send_signal(signal.SIGTERM)
    else:
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "PREEMPT").touch()
    printed, complaints = process.communicate(timeout=300)
    assert process.returncode == 75, complaints
    reason = "SIGTERM" if way == "signal" else "PREEMPT"
    assert re.search(f"Stop requested by .*{reason}.*saved .*checkpoint_0", complaints), complaints
    assert "the run failed" not in complaints
    assert not (tmp_path / "run" / "PREEMPT").exists(), "the next start is not preempted"
    seen = [int(line) for line in printed.split()]
    again = run_accelerate(*words, directory=tmp_path)
    assert again.code == 0, again.complaints
    later = [int(line) for line in again.printed.split()]
    assert sorted(seen + later) == list(range(200)), "every sample once"
