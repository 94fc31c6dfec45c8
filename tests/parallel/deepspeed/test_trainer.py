"""transformers' Trainer with a DeepSpeed config, on 2 processes, in the venv of the libraries."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.ecosystem.libraries import PYTHON, needs_libraries, program, run_command
from tests.sizes import at_night

pytestmark = [needs_libraries]
SCRIPT = Path(__file__).with_name("trainer_by_deepspeed.py")


@cache
def has_deepspeed() -> bool:
    return subprocess.run([PYTHON, "-c", "import deepspeed"], capture_output=True).returncode == 0


def results(stage: int, folder: Path) -> dict[str, Any]:
    if not has_deepspeed():
        pytest.skip("no DeepSpeed beside the libraries: .ci/install_deepspeed $MESHWRIGHT_LIBRARIES_PYTHON")
    command = [program("accelerate"), "launch", "--cpu", "--num_processes", "2", str(SCRIPT), str(stage), str(folder)]
    printed = run_command(*command, directory=folder)
    [line] = [line for line in printed.splitlines() if line.startswith("RESULTS")]
    return dict(json.loads(line.removeprefix("RESULTS")))


@pytest.mark.parametrize("stage", [at_night(2), 3])
def test_trainer_trains_and_resumes_with_a_config(stage: int, tmp_path: Path) -> None:
    found = results(stage, tmp_path)
    assert found["resumed"]["loss"] == pytest.approx(found["whole"]["loss"], abs=1e-5)
    assert found["resumed"]["evaluated"] == pytest.approx(found["whole"]["evaluated"], abs=1e-5)
    assert found["whole"]["saved"] > 20_000
    if stage == 2:
        (tmp_path / "ddp").mkdir()
        by_ddp = results(-1, tmp_path / "ddp")
        for name in ("loss", "grad_norm", "evaluated"):
            assert found["whole"][name] == pytest.approx(by_ddp["whole"][name], abs=1e-5)
