"""The document that shows SwanLab's own tracker: its program runs as it is written, and SwanLab has its losses."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import environment, run_accelerate
from tests.sizes import at_night
from tests.tracking.stores import offline
from tests.tracking.stores.reading import swanlab

from .documents import DIRECTORY

pytestmark = [
    pytest.mark.skipif(not DIRECTORY.is_dir(), reason="the documents are not here: set SEED_DOCUMENTS"),
    pytest.mark.skipif(importlib.util.find_spec("swanlab") is None, reason="pip install swanlab==0.7.20"),
    pytest.mark.skipif(
        importlib.util.find_spec("torchvision") is None, reason="pip install --no-deps torchvision, and pillow"
    ),
]

NUM_TRAIN, NUM_TEST, BATCH_SIZE, EPOCHS = 60, 40, 16, 5

# CIFAR-10 and the pretrained weights are downloads: few small images and random weights stand in for them.
STAGE = f"""
import runpy, sys
import torch
from tests.seeds import stage

library = stage.bring_torchvision()
stage.CIFAR10.size, stage.CIFAR10.num_train, stage.CIFAR10.num_test = 16, {NUM_TRAIN}, {NUM_TEST}
from torchvision.models import ResNet18_Weights, resnet18
ResNet18_Weights.get_state_dict = lambda self, *arguments, **options: resnet18().state_dict()
torch.manual_seed(0)
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def whole_program() -> str:
    """Return the last block of the document, which imports everything that it uses; its fence has line numbers."""
    (document,) = DIRECTORY.glob("000_*.txt")
    blocks = re.findall(r"^```python[^\n]*\n(.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return str(blocks[-1])


@pytest.mark.parametrize("processes", [at_night(1), at_night(2)])
def test_000_trains_and_swanlab_has_every_loss_in_order(processes: int, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(whole_program(), encoding="utf-8")
    (tmp_path / "stage.py").write_text(STAGE)
    variables = {**offline(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    if processes == 1:
        ended = subprocess.run(
            [sys.executable, "stage.py", "program.py"],
            cwd=tmp_path,
            env=environment(tmp_path, **variables),
            capture_output=True,
            text=True,
            timeout=180,
        )
        code, printed, complaints = ended.returncode, ended.stdout, ended.stderr
    else:
        launched = run_accelerate(
            *("launch", "--num_processes", processes, "--cpu", "stage.py", "program.py"),
            directory=tmp_path,
            **variables,
        )
        code, printed, complaints = launched.code, launched.printed, launched.complaints
    assert code == 0, complaints[-4000:]

    steps_per_epoch = -(-NUM_TRAIN // (BATCH_SIZE * processes))
    shown = [float(loss) for loss in re.findall(r"train epoch \d \[\d+/\d+\] \| train loss ([\d.e-]+)", printed)]
    stored = swanlab(tmp_path)
    assert len(shown) == EPOCHS * steps_per_epoch
    assert stored.curves["training_loss"] == [(step, pytest.approx(loss)) for step, loss in enumerate(shown)]
    epochs = [epoch for epoch in range(EPOCHS) for _ in range(steps_per_epoch)]
    assert [value for _, value in stored.curves["epoch_num"]] == epochs
    assert [step for step, _ in stored.curves["eval acc"]] == list(range(EPOCHS))
    assert all(0 <= value <= 1 for _, value in stored.curves["eval acc"])
    config = {"num_epoch": EPOCHS, "batch_num": BATCH_SIZE, "learning_rate": 1e-3}
    assert {name: stored.config[name] for name in config} == config  # SwanLab adds more
    assert (tmp_path / "cifar_cls.pth" / "model.safetensors").is_file()
