"""What a run leaves behind, and what a dry run does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import Accelerator
from meshwright.accelerator.effects import dry_run, effect


def leave_everything(accelerator: Accelerator, folder: Path) -> list[Any]:
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    accelerator.init_trackers("project")
    accelerator.log({"loss": 1.0}, step=1)
    accelerator.get_tracker("jsonl").anything(1, of="it")
    accelerator.save({"a": 1}, folder / "saved.bin")
    accelerator.save_model(model, folder / "model")
    return [accelerator.save_state(str(folder / "state")), accelerator.end_training()]


def test_a_dry_run_leaves_nothing(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    with dry_run():
        assert leave_everything(accelerator, tmp_path) == [str(tmp_path / "state"), None]
    assert not list(tmp_path.iterdir())
    accelerator.init_trackers("project")
    accelerator.log({"loss": 1.0}, step=1)
    accelerator.save_state(str(tmp_path / "state"))
    assert (tmp_path / "state").is_dir()


def test_a_dry_run_ends_with_an_exception_and_may_be_inside_of_another() -> None:
    class Saving:
        @effect(instead=lambda self, name: f"not {name}")
        def save(self, name: str) -> str:
            """Save it."""
            return name

    saving = Saving()
    with dry_run():
        with pytest.raises(KeyError), dry_run():
            raise KeyError
        assert saving.save("it") == "not it"
    assert saving.save(name="it") == "it"
    assert Saving.save.__doc__ == "Save it."
