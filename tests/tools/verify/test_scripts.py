"""Right scripts of many kinds are found right, and ranks that do something of their own are found."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.ecosystem.libraries import PYTHON, needs_libraries
from tests.sizes import sized

from .verified import verify_all

HERE = Path(__file__).parent
ALL_RIGHT = (
    *("plain", "accumulate", "no_sync", "two_losses", "two_outputs", "two_forwards", "gradient_noise", "clamp"),
    *("loss_weight", "closure", "lbfgs", "early_break", "trigger", "num_items", "spectral_norm", "weight_norm", "tied"),
    *("frozen", "autograd_function", "ema", "evaluation", "metrics", "clip_norm", "clip_value", "sampler"),
    *(
        "batch_sampler",
        "checkpointing",
        "distillation",
        "diffusion",
        "gan",
        "stream",
        "plain_scheduler",
        "raw_backward",
    ),
    *("dropout", "batch_norm", "one_batch", "gradient_penalty", "split_batches", "gradient_hook"),
)
RIGHT = sized(gate=["loss_weight", "closure", "two_outputs", "gan"], nightly=list(ALL_RIGHT))
LIBRARIES = sized(gate=["trainer"], nightly=["trainer", "trainer_accumulating", "trl", "diffusers"])
FOUND = {
    "augmentation": "input",
    "buffer": "output",
    "offset": "output",
    "detached": "gradient",
    "rate": "learning rate",
    "rate_times_processes": "learning rate",
    "decay": "parameter",
    "epsilon": "parameter",
    "same_samples": "samples",
    "gradient_hook": "gradient",
    "divided": "loss",
    "multiplied": "loss",
    "never_synchronised": "gradient",
    "zeroed": "clipping",
    "clipped_alone": "clipping",
    "drift": "parameter",
    "scheduler_steps": "learning rate",
    "skipped_step": "calls",
}
FAULTS = sized(gate=["same_samples", "skipped_step"], nightly=list(FOUND))


def verify(script: str, kinds: Sequence[str], python: str = sys.executable) -> dict[str, dict[str, Any]]:
    """Verify a script on two processes in every kind."""
    jobs = [(kind, ["--num_processes", "2", str(HERE / script), kind]) for kind in kinds]
    return dict(zip(kinds, verify_all(jobs, python=python, seconds=3000), strict=True))


@pytest.fixture(scope="module")
def of_right_scripts() -> dict[str, dict[str, Any]]:
    """Verify the right scripts."""
    return verify("right_script.py", RIGHT)


@pytest.fixture(scope="module")
def of_libraries() -> dict[str, dict[str, Any]]:
    """Verify the scripts of other libraries."""
    return verify("library_script.py", LIBRARIES, PYTHON)


@pytest.fixture(scope="module")
def of_faults() -> dict[str, dict[str, Any]]:
    """Verify the script with every fault."""
    return verify("rank_script.py", FAULTS)


@pytest.mark.parametrize("kind", RIGHT)
def test_a_right_script_is_found_right(kind: str, of_right_scripts: dict[str, dict[str, Any]]) -> None:
    result = of_right_scripts[kind]
    assert result.get("equal"), result.get("panel", result)
    assert result["steps"] == 2
    assert "parameters" in result["largest"]


@needs_libraries
@pytest.mark.parametrize("kind", LIBRARIES)
def test_a_right_script_of_another_library_is_found_right(kind: str, of_libraries: dict[str, dict[str, Any]]) -> None:
    result = of_libraries[kind]
    assert result.get("equal"), result.get("panel", result)
    assert result["steps"] == 2


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_does_something_of_its_own_is_found(fault: str, of_faults: dict[str, dict[str, Any]]) -> None:
    result = of_faults[fault]
    assert result.get("equal") is False, result.get("panel", result)
    assert result["first"]["what"] == FOUND[fault], result["panel"]
    if fault == "skipped_step":
        assert result["first"]["name"] == "rank 1 begins a backward pass where rank 0 steps its optimizer"
        assert "A condition that only one rank meets" in result["panel"]
        assert "Errno" not in result["panel"] + result["complaints"]
