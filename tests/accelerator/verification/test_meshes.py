"""Right scripts on every mesh: no false alarm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parallel.ways import WAYS
from tests.sizes import sized

from .verified import verify_all

SCRIPT = Path(__file__).with_name("healthy_script.py")
MESHES = [way for way in WAYS if way != "one"]
NO_PLAN = {("gpt2", way) for way in MESHES if "tp" in way} | {("convolution", way) for way in MESHES if "tp" in way}
"""Models without a published plan of tensor parallelism."""
FAMILIES = ("torch", "llama", "gpt2", "mixture", "convolution")
CASES = sized(
    gate=[
        ("torch", "fsdp2xtp2"),
        ("torch", "pp2"),
        ("llama", "tp2"),
        ("mixture", "fsdp2"),
        ("convolution", "ddp2"),
    ],
    nightly=[(family, way) for family in FAMILIES for way in MESHES if (family, way) not in NO_PLAN],
)


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, str], dict[str, Any]]:
    """Verify the script in all cases."""
    jobs = [
        (f"{family} {way}", ["--num_processes", str(WAYS[way][0]), "--full_size", str(SCRIPT), family, way])
        for family, way in CASES
    ]
    return dict(zip(CASES, verify_all(jobs, seconds=3000), strict=True))


@pytest.mark.parametrize(("family", "way"), CASES)
def test_a_right_script_is_found_right(family: str, way: str, results: dict[tuple[str, str], dict[str, Any]]) -> None:
    result = results[family, way]
    assert result.get("equal"), result.get("panel", result)
    assert result["steps"] == 2
    assert set(result["largest"]) >= {"losses", "gradients", "norm", "clippings", "parameters"}
    assert result["largest"]["gradients"] < 1e-4
