"""A plan from few blocks says what a plan from all blocks says: memory by owner, FLOPs and communication."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.ecosystem.libraries import PYTHON, needs_libraries
from tests.sizes import cases, sized

FAMILIES = ("llama", "gpt2", "bert", "t5", "mixtral")
REPOSITORY = Path(__file__).parents[4]
OURS = [(family, sharded) for family in FAMILIES for sharded in ("", "--sharded")]


def plans(python: str, words: str) -> list[dict[str, Any]]:
    """Return the plan from few blocks and the plan from all of them."""
    path = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [python, "-m", "tests.tools.plan.depths.compare", words]
    done = warm.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=variables, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(str(done.stdout).splitlines()[-1])
    return found


def check(python: str, words: str) -> None:
    """Assert that both plans are the same."""
    few, all_ = plans(python, words)
    assert few["all_blocks"] == all_["all_blocks"] == all_["blocks"]
    assert few["blocks"] < all_["blocks"] or words.startswith("t5 --library")  # its first block is unlike the others
    for of_few, of_all in zip(few["ranks"], all_["ranks"], strict=True):
        assert of_few["phase"] == of_all["phase"]
        assert of_few["peak"] == pytest.approx(of_all["peak"], rel=1e-3, abs=1 << 12)
        for name in ("flops", "sent"):
            assert of_few[name] == pytest.approx(of_all[name], rel=1e-6), name
        if "--sharded" in words:  # the buckets of replicas are filled without regard to blocks
            assert of_few["calls"] == pytest.approx(of_all["calls"])


@pytest.mark.parametrize(("family", "sharded"), cases(gate=[("llama", "--sharded")], nightly=OURS))
def test_few_blocks_of_a_model_are_planned_as_all_of_them(family: str, sharded: str) -> None:
    check(sys.executable, f"{family} --layers {sized(gate=6, nightly=9)} {sharded}")


@pytest.mark.nightly
def test_few_micro_batches_of_a_pipeline_are_planned_as_all_of_them() -> None:
    few, all_ = plans(sys.executable, "llama --layers 8 --pipeline")
    for of_few, of_all in zip(few["ranks"], all_["ranks"], strict=True):
        assert of_all["phase"] != "update", "the peak is in the micro-batches"
        assert of_all["flops"]["backward"] > of_all["flops"]["fp32"], "a stage's backward pass is no recomputation"
        assert sum(of_few["peak"].values()) == pytest.approx(sum(of_all["peak"].values()), rel=3e-3)


@needs_libraries
@pytest.mark.nightly
@pytest.mark.parametrize("sharded", ["", "--sharded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_few_blocks_of_a_model_of_transformers_are_planned_as_all_of_them(family: str, sharded: str) -> None:
    check(PYTHON, f"{family} --library --layers 9 {sharded}")
