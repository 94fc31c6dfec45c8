"""The files that the commands of the pages name, in a folder of their own."""

from __future__ import annotations

import shutil
from pathlib import Path

from meshwright.tracking.jsonl import JSONLTracker

from .pages import ROOT

TRAIN = Path(__file__).with_name("train_script.py")
_MODEL = """
import torch

def make():
    return torch.nn.Linear(8, 2)

def batch(batch_size):
    return torch.zeros(batch_size, 8)

def loss(outputs, batch):
    return outputs.square().mean()
"""
_OLD_CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
mixed_precision: bf16
num_processes: 2
"""


def furnish(folder: Path) -> None:
    """Put a script to train, a module of the same, a model, an old file of settings and two logged runs there."""
    shutil.copy(TRAIN, folder / "train.py")
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    shutil.copy(TRAIN, folder / "package" / "train.py")
    (folder / "mine.py").write_text(_MODEL)
    (folder / "old.yaml").write_text(_OLD_CONFIG)
    (folder / "hosts").write_text("localhost slots=8\n")
    (folder / "examples").symlink_to(ROOT / "examples")
    _log(folder / "runs", "digits", "first")
    _log(folder, ".", "run_a")
    _log(folder, ".", "run_b")


def _log(folder: Path, project: str, run: str) -> None:
    tracker = JSONLTracker(project, folder, run)
    tracker.start()
    for step in range(10):
        tracker.log({"train/loss": 1 / (1 + step)}, step=step)
    tracker.finish()
