"""Consensus on a block, and the report of a load. Faults of files are tested in test_faults.py."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright import PartialState
from meshwright.checkpoint.commit.engine import CheckpointEngine, CheckpointError, LoadReport
from meshwright.checkpoint.group import CheckpointGroup
from meshwright.runtime.group.runtime import Runtime
from tests.ranks import ranks


def engine() -> CheckpointEngine:
    PartialState(cpu=True)
    return CheckpointEngine(CheckpointGroup.of_all_ranks(Runtime.current(), on_each_node=False))


def fail_from(rank: int, own: CheckpointEngine) -> None:
    with own.consensus("it was not done"):
        if own.group.rank >= rank:
            raise ValueError(f"the reason of {own.group.rank}")


@ranks(1, 3)
def test_all_ranks_succeed_or_all_name_the_failed_rank(world_size: int) -> None:
    own = engine()
    with own.consensus("nothing happened"):
        pass
    for failing in range(world_size):
        with pytest.raises(CheckpointError) as error:
            fail_from(failing, own)
        more = world_size - failing - 1
        others = f" (and {more} more ranks)" if more else ""
        where = f"rank {failing}{others}: " if world_size > 1 else ""
        assert str(error.value) == f"it was not done: {where}the reason of {failing}."
        assert isinstance(error.value.__cause__, ValueError) == (own.group.rank >= failing)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device", "a/b"), "No space left on device (a/b)"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (ValueError("two words."), "two words"),
        (KeyError("name"), "KeyError: 'name'"),
    ],
)
def test_errors_become_readable_messages(error: Exception, message: str) -> None:
    with pytest.raises(CheckpointError, match="not done") as raised, engine().consensus("not done"):
        raise error
    assert str(raised.value) == f"not done: {message}."


def test_an_interruption_by_the_user_is_passed_on() -> None:
    with pytest.raises(KeyboardInterrupt), engine().consensus("not done"):
        raise KeyboardInterrupt


@ranks(2)
def test_gather_and_broadcast() -> None:
    group = engine().group
    assert group.gather({"rank": group.rank}) == [{"rank": 0}, {"rank": 1}]
    item: Any = "token" if group.rank == 0 else None
    assert group.broadcast(item) == "token"
    assert group.is_coordinator == (group.rank == 0)


def test_a_report_says_what_there_is_to_say() -> None:
    clean = LoadReport(path="ckpt", step=12)
    assert clean
    assert str(clean) == "Loaded ckpt (step 12)"
    assert clean.differences == []
    report = LoadReport(path="ckpt", missing=["a (a.bin)"], extra=["b (b.bin)"], changes=["c"])
    assert report
    assert report.differences == ["missing in ckpt: a (a.bin)", "in ckpt, but not prepared here: b (b.bin)", "c"]
    assert str(report).splitlines() == ["Loaded ckpt", *report.differences]
