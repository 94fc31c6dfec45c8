"""Right scripts on every mesh: no false alarm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ecosystem.libraries import PYTHON, needs_libraries
from tests.parallel.ways import WAYS
from tests.sizes import sized

from .verified import verify_all

SCRIPT = Path(__file__).with_name("healthy_script.py")
MESHES = [way for way in WAYS if way != "one"]
NO_PLAN = {("gpt2", way) for way in MESHES if "tp" in way} | {("convolution", way) for way in MESHES if "tp" in way}
"""Models without a published plan of tensor parallelism."""
OF_TORCH, OF_TRANSFORMERS = ("torch", "convolution"), ("llama", "gpt2", "mixture")
REFUSED = {("gpt2", way) for way in MESHES if "pp" in way} | {("mixture", way) for way in MESHES if "pp" in way}
"""A head tied to the first stage, and experts that cannot be traced without computing."""
NO_SEQUENCE = {("convolution", way) for way in MESHES if "cp" in way or "pp" in way}


def cases_of(families: tuple[str, ...], gate: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return a few cases for the gate, and all for the night."""
    left_out = NO_PLAN | REFUSED | NO_SEQUENCE
    return sized(gate=gate, nightly=[(f, way) for f in families for way in MESHES if (f, way) not in left_out])


CASES_OF_TORCH = cases_of(OF_TORCH, [("torch", "fsdp2xtp2"), ("torch", "cp2"), ("convolution", "ddp2")])
CASES_OF_TRANSFORMERS = cases_of(OF_TRANSFORMERS, [("llama", "tp2")])


@pytest.fixture(scope="module")
def of_torch() -> dict[tuple[str, str], dict[str, Any]]:
    """Verify the script with models of torch."""
    return dict(zip(CASES_OF_TORCH, verify_all(list(map(job, CASES_OF_TORCH)), seconds=3000), strict=True))


@pytest.fixture(scope="module")
def of_transformers() -> dict[tuple[str, str], dict[str, Any]]:
    """Verify the script with models of transformers."""
    jobs = list(map(job, CASES_OF_TRANSFORMERS))
    return dict(zip(CASES_OF_TRANSFORMERS, verify_all(jobs, python=PYTHON, seconds=3000), strict=True))


def job(case: tuple[str, str]) -> tuple[str, list[str]]:
    """Return the words that verify the script in one case."""
    family, way = case
    return f"{family} {way}", ["--num_processes", str(WAYS[way][0]), "--full_size", str(SCRIPT), family, way]


@pytest.mark.parametrize("case", CASES_OF_TORCH, ids=" ".join)
def test_a_right_script_is_found_right(case: tuple[str, str], of_torch: dict[tuple[str, str], dict[str, Any]]) -> None:
    check(of_torch[case])


@needs_libraries
@pytest.mark.parametrize("case", CASES_OF_TRANSFORMERS, ids=" ".join)
def test_a_right_script_of_transformers_is_found_right(
    case: tuple[str, str], of_transformers: dict[tuple[str, str], dict[str, Any]]
) -> None:
    check(of_transformers[case])


def check(result: dict[str, Any]) -> None:
    """Assert that two steps were compared and found equal."""
    assert result.get("equal"), result.get("panel", result)
    assert result["steps"] == 2
    assert set(result["largest"]) >= {"losses", "gradients", "norm", "clippings", "parameters"}
    assert result["largest"]["gradients"] < 1e-4
