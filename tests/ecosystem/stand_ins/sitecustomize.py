"""Record what a script trains, from its first line on: every loss, the parameters after every step, its measures.

Python imports this module at its start, in every process that has this folder on its path. It reads torch alone, so it
sees the same thing under any `accelerate`.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import random
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

losses: list[float] = []
steps: list[str] = []
measured: list[str] = []
_last: list[torch.Tensor] = []
_backward = torch.autograd.backward


def digest(*values: Any) -> str:
    """Return a short text that differs for different values."""
    found = hashlib.sha256()
    for value in values:
        if isinstance(value, torch.Tensor):
            found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(np.asarray(value).tolist()).encode())
    return found.hexdigest()[:16]


def _recording_backward(tensors: Any, *arguments: Any, **options: Any) -> None:
    losses.extend([float(tensors)] if isinstance(tensors, torch.Tensor) and tensors.numel() == 1 else [])
    _backward(tensors, *arguments, **options)


def _record_step(optimizer: Optimizer, _arguments: Any, _options: Any) -> None:
    if not type(optimizer).__module__.startswith("accelerate"):  # its wrapper calls the optimizer that counts
        _last[:] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        steps.append(digest(*_last))


def _save() -> None:
    if steps or losses:
        record = {"losses": losses, "steps": steps, "measured": measured, "last": [p.detach().cpu() for p in _last]}
        torch.save(record, Path(os.environ["SCRIPT_RECORDS"]) / f"{os.environ.get('RANK', '0')}.pt")


if "SCRIPT_RECORDS" in os.environ:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.autograd.backward = _recording_backward
    register_optimizer_step_post_hook(_record_step)
    atexit.register(_save)
if "SCRIPT_HAS_IMAGES" in os.environ:
    import_module("tests.ecosystem.scenarios.vision")  # torchvision's operators, which are not compiled here
