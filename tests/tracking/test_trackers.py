from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import Accelerator, GeneralTracker
from tests.ranks import ranks


class Remembering(GeneralTracker):
    name = "remembering"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.seen

    def start(self) -> None:
        self.seen.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.seen.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.seen.append((step, values, kwargs))

    def finish(self) -> None:
        self.seen.append("finish")


class OnEveryRank(Remembering):
    name = "on_every_rank"
    main_process_only = False


def test_a_run_from_beginning_to_end() -> None:
    tracker = Remembering()
    accelerator = Accelerator(log_with=[tracker], cpu=True)
    assert accelerator.log_with == [tracker]
    assert accelerator.trackers == []
    accelerator.init_trackers("project", config={"lr": 1})
    accelerator.log({"loss": 2}, step=3, log_kwargs={"remembering": {"commit": True}})
    assert accelerator.trackers == [tracker]
    assert accelerator.get_tracker("remembering") is tracker
    assert accelerator.get_tracker("remembering", unwrap=True) is tracker.seen
    accelerator.end_training()
    assert tracker.seen == ["start", {"lr": 1}, (3, {"loss": 2}, {"commit": True}), "finish"]


def test_logging_before_the_trackers_are_open_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    tracker = Remembering()
    accelerator = Accelerator(log_with=tracker, cpu=True)
    accelerator.log({"loss": 1})
    accelerator.log({"loss": 1})
    [message] = [record.getMessage() for record in caplog.records]
    assert "log() was called before init_trackers(), and logged nothing" in message
    accelerator.init_trackers("project")
    accelerator.log({"loss": 2})
    accelerator.end_training()
    assert tracker.seen == ["start", (None, {"loss": 2}, {}), "finish"]


def test_logging_after_the_end_says_so(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(log_with=Remembering(), cpu=True)
    accelerator.init_trackers("project")
    accelerator.end_training()
    accelerator.log({"loss": 1})
    assert "log() was called after end_training(), and logged nothing" in caplog.text


def test_without_trackers_logging_does_nothing() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.init_trackers("project", config={"a": 1})
    accelerator.log({"loss": 1})
    assert accelerator.trackers == []
    assert accelerator.log_with == []
    with pytest.raises(ValueError, match=r"log_with='wandb'"):
        accelerator.get_tracker("wandb")


def test_an_unknown_tracker_raises_with_the_known_ones() -> None:
    accelerator = Accelerator(log_with=Remembering(), cpu=True)
    with pytest.raises(ValueError, match=r"call accelerator\.init_trackers"):
        accelerator.get_tracker("remembering")
    accelerator.init_trackers("project")
    with pytest.raises(ValueError, match="log_with has remembering"):
        accelerator.get_tracker("wandb")
    accelerator.end_training()


def test_options_for_a_tracker_that_is_not_there_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(log_with=Remembering(), cpu=True)
    accelerator.init_trackers("project", init_kwargs={"wandbb": {"entity": "x"}})
    assert "init_kwargs is for wandbb" in caplog.text
    accelerator.end_training()


def test_beginning_again_closes_the_first_run() -> None:
    tracker = Remembering()
    accelerator = Accelerator(log_with=tracker, cpu=True)
    accelerator.init_trackers("first")
    accelerator.log({"x": 1})
    accelerator.init_trackers("second")
    accelerator.end_training()
    assert tracker.seen == ["start", (None, {"x": 1}, {}), "finish", "start", "finish"]


@ranks(2)
def test_only_the_main_process_logs_unless_the_tracker_is_for_every_process() -> None:
    main_only, everywhere = Remembering(), OnEveryRank()
    accelerator = Accelerator(log_with=[main_only, everywhere], cpu=True)
    accelerator.init_trackers("project")
    accelerator.log({"rank": accelerator.process_index})
    handle = accelerator.get_tracker("remembering", unwrap=True)
    handle.append("direct")
    accelerator._trackers.finish()  # the process group is the bench's
    mine = (None, {"rank": accelerator.process_index}, {})
    assert everywhere.seen == ["start", mine, "finish"]
    assert main_only.seen == (["start", mine, "direct", "finish"] if accelerator.is_main_process else [])


@pytest.mark.parametrize(("how", "expected"), [("mean", 2.0), ("sum", 6.0), ("max", 3.0), ("min", 1.0)])
@ranks(3)
def test_numbers_of_all_ranks_become_one_before_they_are_logged(how: str, expected: float) -> None:
    tracker = Remembering()
    accelerator = Accelerator(log_with=tracker, cpu=True)
    accelerator.init_trackers("project")
    own = accelerator.process_index + 1
    # Dictionaries in another order and of other kinds of numbers still mean the same names.
    values = {"loss": torch.tensor([float(own)]), "int": own, "text": "kept"}
    accelerator.log(dict(reversed(values.items())) if own == 2 else values, step=1, reduce=how)
    accelerator._trackers.finish()
    if accelerator.is_main_process:
        assert tracker.seen[1] == (1, {"loss": expected, "int": expected, "text": "kept"}, {})


@ranks(2)
def test_ranks_with_different_names_are_listed() -> None:
    from accelerate.utils.operations import DistributedOperationException

    accelerator = Accelerator(log_with=Remembering(), cpu=True)
    accelerator.init_trackers("project")
    values = {"loss": 1.0} if accelerator.is_main_process else {"accuracy": 1.0, "loss": 1.0}
    with pytest.raises(DistributedOperationException, match=r"rank 0: loss\n  rank 1: accuracy, loss"):
        accelerator.log(values, reduce="mean")
    accelerator._trackers.finish()


def test_an_unknown_reduction_names_the_known_ones() -> None:
    accelerator = Accelerator(log_with=Remembering(), cpu=True)
    accelerator.init_trackers("project")
    with pytest.raises(ValueError, match="mean, sum, max, min"):
        accelerator.log({"x": 1}, reduce="median")
    accelerator.end_training()


@pytest.mark.parametrize("ending", ["", "raise RuntimeError('the script fails')", "raise SystemExit(3)"])
def test_a_script_that_ends_without_end_training_keeps_what_it_logged(tmp_path: Path, ending: str) -> None:
    program = f"""
from meshwright import Accelerator
accelerator = Accelerator(log_with="jsonl", project_dir={str(tmp_path)!r}, cpu=True)
accelerator.init_trackers("project", init_kwargs={{"jsonl": {{"run": "run"}}}})
for step in range(200):
    accelerator.log({{"loss": 1 / (step + 1)}}, step=step)
{ending}
"""
    subprocess.run([sys.executable, "-c", program], check=False, capture_output=True)
    lines = (tmp_path / "project" / "run" / "metrics.jsonl").read_text().splitlines()
    assert sum('"values"' in line for line in lines) == 200
    assert '"end"' in lines[-1]
