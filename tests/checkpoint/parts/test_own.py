"""A copy of what each rank holds goes on as if nothing had happened, however the model is spread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.config.environment import patch_environment
from tests.parallel.ways import WAYS, run
from tests.ranks import run_on_ranks
from tests.sizes import sized

COPIED, STEPS, EVERY = 4, 6, 2
"""The copy of step 4 is complete before step 6 ends."""
SPREAD = sized(gate=["tp2", "pp2xfsdp2"], nightly=[way for way in WAYS if "cp" not in way])


def train_with_copies(way: str, folder: str, steps: int) -> list[float]:
    settings: dict[str, Any] = {
        "meshwright_memory_copies_every": EVERY,
        "meshwright_memory_copies_dir": f"{folder}/copies",
    }
    with patch_environment(**settings):
        return run(way, steps=steps, load_from=f"{folder}/nothing")


@pytest.mark.parametrize("way", SPREAD)
def test_a_run_goes_on_from_copies_of_what_each_rank_holds(way: str, tmp_path: Path) -> None:
    processes = WAYS[way][0]
    whole = run_on_ranks(processes, train_with_copies, way=way, folder=str(tmp_path / "whole"), steps=COPIED + STEPS)
    run_on_ranks(processes, train_with_copies, way=way, folder=str(tmp_path), steps=STEPS)
    again = run_on_ranks(processes, train_with_copies, way=way, folder=str(tmp_path), steps=STEPS)
    assert [losses[COPIED:] for losses in whole] == again
