"""`meshwright compare`, with accelerate 1.15 beside this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.tools.compare.records import ComparedRun
from meshwright.tools.compare.runs import Runner, Side, our_side, published_side
from meshwright.tools.compare.verdict import first_difference
from tests.launching import environment

REFERENCE = os.environ.get("MESHWRIGHT_REFERENCE_PYTHON", "")
needs_reference = pytest.mark.skipif(not REFERENCE, reason="set MESHWRIGHT_REFERENCE_PYTHON to accelerate 1.15's")

SCRIPT = """
import os
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

import accelerate
from accelerate import Accelerator
from accelerate.utils import set_seed

changed = os.environ.get("CHANGED", "") if "+meshwright" in accelerate.__version__ else ""
set_seed(1)
accumulation = int(os.environ.get("ACCUMULATION", "1"))
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
data = TensorDataset(torch.randn(128, 8), torch.randn(128, 1))
order = list(range(128))
if changed == "order":
    order[9], order[13] = order[13], order[9]
loader = DataLoader(Subset(data, order), batch_size=4, shuffle="SHUFFLE" in os.environ)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for step, (x, y) in enumerate(loader, start=1):
    if step == 3 and changed == "seed":
        torch.manual_seed(99)
    if step == 3 and changed == "rate":
        optimizer.param_groups[0]["lr"] *= 1.001
    if step == 3 and changed == "parameter":
        model[0].weight.data[0, 0] += 1e-3
    with accelerator.accumulate(model):
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss * 1.001 if step == 3 and changed == "scale" else loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    Path("step.txt").write_text(str(step))
raise RuntimeError("the recorder has not ended the script")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT, encoding="utf-8")
    return file


def compare(script: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "meshwright", "compare", "--reference", REFERENCE, *options, script.name],
        cwd=script.parent,
        env=environment(script.parent, **variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


@needs_reference
def test_an_equal_script_is_equal_on_one_process_and_on_two(script: Path) -> None:
    result = script.parent / "result.json"
    ended = compare(script, "--processes", "1,2", "--runs", "1", "--steps", "4", "--json", str(result), SHUFFLE="1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 process: bitwise equal" in ended.stdout
    assert "2 processes: bitwise equal" in ended.stdout
    told = json.loads(result.read_text(encoding="utf-8"))
    assert [(v["processes"], v["first"], v["largest"]) for v in told["processes"]] == [(1, None, 0.0), (2, None, 0.0)]
    for side in ("theirs", "ours"):
        assert told["processes"][1][side]["files"] == ["step.txt"]
        assert told["processes"][1][side]["peak_memory"] > 1 << 25
    assert not (script.parent / "step.txt").exists(), "the runs have written into the user's folder"


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Runner, ComparedRun]]:
    folder = tmp_path_factory.mktemp("compared")
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    (folder / "runs").mkdir()
    runner = Runner((str(folder / "train.py"),), 4, None, True, False, 300.0, folder / "runs")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        yield runner, run(runner, published_side(REFERENCE, ())[0])


def run(runner: Runner, side: Side) -> ComparedRun:
    *_, recorded = runner.run(side, 1)
    assert isinstance(recorded, ComparedRun)
    return recorded


@needs_reference
@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ("rate", "learning rate"), ("seed", "loss"), ("order", "samples"), ("scale", "loss"), ("parameter", "loss"),
    ],
)  # fmt: skip
def test_a_change_is_found_at_its_step(
    changed: str, what: str, theirs: tuple[Runner, ComparedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHANGED", changed)
    found = first_difference(theirs[1], run(theirs[0], our_side(())))
    assert found is not None
    assert (found.step, found.what) == (3, what)


@needs_reference
@pytest.mark.nightly
def test_a_change_is_told_with_exit_code_1_and_accumulation_is_compared(script: Path) -> None:
    options = ("--runs", "2", "--steps", "4")
    changed = compare(script, *options, CHANGED="scale")
    assert changed.returncode == 1, changed.stdout + changed.stderr
    assert "DIFFERENT at step 3: the loss" in changed.stdout
    accumulated = compare(script, *options, "--processes", "2", ACCUMULATION="2")
    assert accumulated.returncode == 0, accumulated.stdout + accumulated.stderr


def test_without_accelerate_1_it_is_refused_with_the_remedy(script: Path, tmp_path: Path) -> None:
    ours = str(Path(__file__).parents[2] / "src")
    ended = subprocess.run(
        [sys.executable, "-m", "meshwright", "compare", "--reference", _without_packages(tmp_path), script.name],
        cwd=script.parent,
        env=environment(script.parent, PYTHONPATH=ours),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 2
    assert "pip install 'accelerate<2'" in ended.stderr
    assert "--reference PYTHON" in ended.stderr


def _without_packages(folder: Path) -> str:
    """Return an interpreter that has no packages."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return str(program)
