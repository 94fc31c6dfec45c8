"""The verdict on recorded failures: what NCCL leaves behind on machines that we do not have."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from meshwright.launch.processes.verdict import Ending, judge, panel
from meshwright.watch.hangs.watcher import is_lost_peer_error
from tests.recorded_machines import FOLDER

FAILURES: list[dict[str, Any]] = yaml.safe_load((FOLDER / "failures.yaml").read_text())


def ending(rank: int, left: dict[str, Any]) -> Ending:
    record = (
        {"cause": None, "frames": [], **{key: left[key] for key in ("type", "text", "time")}}
        if "type" in left
        else None
    )
    return Ending(
        rank=rank,
        local_rank=rank,
        exit_code=left["exit_code"],
        ended_by_launcher=left.get("ended_by_launcher", False),
        record=record,
        crash=left.get("crash", ""),
    )


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure["name"].replace(" ", "_"))
def test_the_verdict_on_recorded_failures(failure: dict[str, Any]) -> None:
    verdict = judge([ending(rank, left) for rank, left in failure["ranks"].items()], out_of_memory=False)
    assert verdict.culprit.rank == failure["culprit"]
    assert sorted(each.rank for each in verdict.collateral) == failure["collateral"]
    drawn = panel(verdict, machine_rank=0, num_machines=1, logs=None)
    words = " ".join(drawn.split())
    for expected in failure["panel"]:
        assert " ".join(expected.split()) in words, drawn


def test_the_watcher_knows_a_lost_peer_by_recorded_words_of_nccl() -> None:
    texts = [left["text"] for failure in FAILURES for left in failure["ranks"].values() if "text" in left]
    lost = {text for text in texts if is_lost_peer_error(RuntimeError(text))}
    assert lost == {text for text in texts if "ncclRemoteError" in text}
    assert is_lost_peer_error(RuntimeError("NCCL error: remote process exited or there was a network error"))
