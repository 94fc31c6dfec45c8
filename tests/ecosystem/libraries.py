"""Run a scenario where the libraries are: in a venv of their own, on one process or on two.

`.ci/install_libraries` makes the venv. Beside its packages it has two folders that only some scenarios see: `vision`
holds what asks for torchvision, and `reference` holds accelerate 1.15, which comes before ours on the path that has it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.launching import environment, run_to_success
from tests.ranks.pool import free_port

PYTHON = os.environ.get("MESHWRIGHT_LIBRARIES_PYTHON", "")
SCENARIOS = Path(__file__).with_name("scenarios")
REPOSITORY = Path(__file__).parents[2]

needs_libraries = pytest.mark.skipif(
    not PYTHON, reason="no venv with the libraries: run .ci/install_libraries and set MESHWRIGHT_LIBRARIES_PYTHON"
)


def run_scenario(
    name: str, *arguments: object, world_size: int, directory: Path, time_limit: float = 300.0, **variables: str
) -> dict[str, Any]:
    """Run a scenario, through `accelerate launch` where it has several processes; return what it reports."""
    script = [str(SCENARIOS / f"{name}.py"), *map(str, arguments)]
    if world_size == 1:
        command = [PYTHON, *script]
    else:
        command = [program("accelerate"), "launch", "--cpu", "--num_processes", str(world_size), *script]
    return _report(run_command(*command, directory=directory, time_limit=time_limit, **variables))


def run_with_torchrun(
    name: str, *arguments: object, world_size: int, directory: Path, time_limit: float = 300.0, **variables: str
) -> dict[str, Any]:
    """Run a scenario through torchrun, which starts any accelerate alike; return what it reports."""
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(world_size), "--master_port", str(free_port())]
    script = [str(SCENARIOS / f"{name}.py"), *map(str, arguments)]
    return _report(run_command(PYTHON, *launcher, *script, directory=directory, time_limit=time_limit, **variables))


def run_command(*command: str, directory: Path, time_limit: float = 300.0, **variables: str) -> str:
    """Run a command of the venv in a directory; return what it printed, and fail the test unless it succeeds."""
    path = f"{Path(PYTHON).parent}:{os.environ['PATH']}"
    env = environment(directory, **_OFFLINE, PATH=path, **variables)
    return run_to_success(command, str(command), directory=directory, env=env, time_limit=time_limit)


def folder(name: str) -> str:
    """Return a folder beside the venv's packages, for PYTHONPATH."""
    return str(Path(PYTHON).parents[1] / name)


_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
}


def program(name: str) -> str:
    """Return the path of one of the venv's commands."""
    return str(Path(PYTHON).with_name(name))


def _report(printed: str) -> dict[str, Any]:
    """Return the one line that a scenario prints among the chatter of libraries."""
    lines = [line for line in printed.splitlines() if line.startswith('{"scenario"')]
    assert len(lines) == 1, f"expected one line of results, got {len(lines)}:\n{printed[-4000:]}"
    return dict(json.loads(lines[0]))
