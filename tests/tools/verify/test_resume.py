"""`meshwright check --resume` finds a resume that is not exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import run_accelerate

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from meshwright import Accelerator
from meshwright import ProjectConfiguration, set_seed

set_seed(0)
project = ProjectConfiguration(project_dir="run", automatic_checkpoint_naming=True, total_limit=1)
accelerator = Accelerator(project_config=project, gradient_accumulation_steps=2)
x = torch.randn(48, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if "forgets" not in sys.argv:
    resumed = accelerator.resume()
    if resumed is not None and "reseeds" in sys.argv:
        torch.manual_seed(5)
for epoch in range(5):
    for index, (inputs, targets) in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward((model(inputs) - targets).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and index % 4 == 3:
            accelerator.save_state()
"""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 0, "exact: steps 5 to 10"),
        (("reseeds",), 1, "at step 5 on rank 0 these differ: torch's random state"),
        (("forgets",), 2, "the second start did not load a checkpoint"),
    ],
)
def test_a_script_is_judged(words: tuple[str, ...], code: int, said: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    launched = run_accelerate(
        *("check", "--resume", "--steps", 10, "--kill_at=7", "train.py", *words), directory=tmp_path
    )
    assert said in launched.printed, launched.complaints
    assert launched.code == code
    assert not (tmp_path / "run").exists(), "the user's own folder is left alone"


def test_two_processes_are_compared(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    launched = run_accelerate(
        *("check", "--resume", "--cpu", "--num_processes", 2, "--steps", 10, "train.py"), directory=tmp_path
    )
    assert "on 2 process(es)" in launched.printed, launched.complaints
    assert launched.code == 0


def test_a_kill_outside_of_the_run_is_refused(tmp_path: Path) -> None:
    launched = run_accelerate("check", "--resume", "--steps", 5, "--kill_at", 5, "train.py", directory=tmp_path)
    assert launched.code == 1
    assert "must lie between" in launched.complaints
