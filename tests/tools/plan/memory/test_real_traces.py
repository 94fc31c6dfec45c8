"""The memory of all blocks from five of them, against traces of all: the strategies as they run.

Of three blocks the one in the middle is beside both ends, and FSDP prefetches less there: five are needed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.nightly  # test_expand does this with traces made by hand
CASES = {
    "replicas": "",
    "shards": "--dp_shard 4 --mixed_precision bf16",
    "recomputed and accumulated": "--dp_shard 4 --recompute --accumulation 2",
    "split layers": "--tp 2 --dp_shard 2",
}


@pytest.fixture(scope="module")
def traced() -> dict[str, list[dict[str, Any]]]:
    """The memory of each case, by a trace of all blocks and by an expanded one."""
    command = [sys.executable, "-m", "tests.tools.plan.memory.traced"]
    command += [f"--layers 11 {arguments}" for arguments in CASES.values()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[4], env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_it_equals_the_trace_of_all_blocks(case: str, traced: dict[str, list[dict[str, Any]]]) -> None:
    whole, few = traced[case]
    assert few["blocks"] == whole["blocks"] == 11
    assert few["phase"] == whole["phase"]
    assert few["peak"] == pytest.approx(whole["peak"], rel=1e-4, abs=1 << 14)
    assert few["most"] == pytest.approx(whole["most"], rel=1e-3, abs=1 << 16)
    for held in ("reserved", "expandable"):
        assert few[held] == pytest.approx(whole[held], rel=0.03)
