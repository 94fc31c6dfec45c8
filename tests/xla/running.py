"""Run a scenario where torch_xla is: in a venv of its own, on XLA's CPU device. `.ci/install_xla` makes the venv."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.launching import environment

PYTHON = os.environ.get("MESHWRIGHT_XLA_PYTHON", "")
SCENARIOS = Path(__file__).with_name("scenarios")

needs_xla = pytest.mark.skipif(
    not PYTHON, reason="no venv with torch_xla: run .ci/install_xla and set MESHWRIGHT_XLA_PYTHON"
)


def run_scenario(name: str, directory: Path, devices: int = 1) -> dict[str, Any]:
    """Run a scenario on so many devices, and return what it reports."""
    ended = run_command(str(SCENARIOS / f"{name}.py"), directory=directory, CPU_NUM_DEVICES=str(devices))
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-6000:]}"
    return dict(json.loads(ended.stdout.splitlines()[-1]))


def run_command(*words: str, directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the venv's python until it ends."""
    # Compiling takes most of the time, and these graphs run for milliseconds.
    quick = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    variables = {"PJRT_DEVICE": "CPU", "TF_CPP_MIN_LOG_LEVEL": "2", **quick, **variables}
    env = environment(directory, **variables)
    return subprocess.run([PYTHON, *words], cwd=directory, env=env, capture_output=True, text=True, timeout=900)
