"""Every way of spreading a model trains it as one process does."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from .ways import WAYS, train

SPREAD = [way for way, (size, _) in WAYS.items() if size > 1]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulating": {"accumulation": 4, "clip": 0.5},
    "tied": {"tied": True},
}


@cache
def alone(variant: str) -> list[float]:
    [losses] = train("one", **VARIANTS[variant])
    return losses


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("way", SPREAD)
def test_the_loss_is_that_of_one_process(way: str, variant: str) -> None:
    if variant == "tied" and "pp" in way:
        pytest.skip("a weight of two stages is refused: see test_pipeline.py")
    per_rank = train(way, **VARIANTS[variant])
    for losses in per_rank:
        assert losses == pytest.approx(alone(variant), abs=1e-5)
