"""`meshwright check --mesh` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.launching import run_accelerate

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from meshwright import Accelerator

accelerator = Accelerator(mixed_precision="bf16")  # no seed, and fp32 all the same
x = torch.randn(64, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
if "plain" in sys.argv:
    model, loader = accelerator.prepare(model, loader)
else:
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for inputs, targets in loader:
    optimizer.zero_grad()
    accelerator.backward((model(inputs) - targets).square().mean())
    if "fails" in sys.argv and accelerator.process_index == 1:
        raise RuntimeError("the second rank cannot go on")
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # on every micro-batch, and not by the Accelerator
    if "rank" in sys.argv and accelerator.process_index == 1:
        for param in model.parameters():
            param.grad *= 1.5
    optimizer.step()
    scheduler.step()
"""


def test_a_script_is_judged_by_exit_code_panel_and_json(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("check", "--mesh", "--num_processes", 2, "--json", "result.json", "train.py")
    right = run_accelerate(*words, directory=tmp_path)
    assert right.code == 0, right.complaints
    assert "the mesh equals one process" in right.printed
    assert json.loads((tmp_path / "result.json").read_text())["equal"] is True

    wrong = run_accelerate(*words, "rank", directory=tmp_path)
    assert wrong.code == 1, wrong.complaints
    assert "the mesh does NOT equal one process" in wrong.printed
    panel = " ".join(wrong.printed.split())
    assert "the gradient of 0.weight between the backward pass and the step (step 1, rank 1)" in panel
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["first"]["what"] == "clipping"
    assert result["sizes"] == {"dp_replicate": 2}


def test_a_size_that_is_given_is_used(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("check", "--mesh", "tp=2", "--num_processes", 2, "train.py")
    launched = run_accelerate(*words, directory=tmp_path)
    assert launched.code == 2
    assert "tp_size=2 splits layers by a plan" in launched.complaints


def test_a_script_that_cannot_be_compared_is_told_why(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    alone = run_accelerate("check", "--mesh", "--num_processes", 1, "train.py", directory=tmp_path)
    assert alone.code == 2
    assert "there is nothing to compare on one process" in alone.complaints

    failing = run_accelerate("check", "--mesh", "--num_processes", 2, "train.py", "fails", directory=tmp_path)
    assert failing.code == 2
    assert "RuntimeError: the second rank cannot go on" in failing.complaints
    assert "the script failed on 2 processes: rank 1 ended with exit code 1" in failing.complaints

    plain = run_accelerate("check", "--mesh", "--num_processes", 2, "train.py", "plain", directory=tmp_path)
    assert plain.code == 2
    assert "no optimizer step was seen on 2 processes" in plain.complaints
