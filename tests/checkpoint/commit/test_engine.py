"""Passing a block together, and the report of a load. What goes wrong with files is in test_faults.py."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate import PartialState
from accelerate.checkpoint.commit.engine import CheckpointEngine, CheckpointError, LoadReport
from accelerate.checkpoint.group import Crew
from accelerate.runtime.group.runtime import Runtime
from tests.ranks import ranks


def engine() -> CheckpointEngine:
    PartialState(cpu=True)
    return CheckpointEngine(Crew.assemble(Runtime.current(), on_each_node=False))


def fail_from(rank: int, own: CheckpointEngine) -> None:
    with own.together("it was not done"):
        if own.crew.rank >= rank:
            raise ValueError(f"the reason of {own.crew.rank}")


@ranks(1, 3)
def test_all_pass_or_all_name_those_that_did_not(world_size: int) -> None:
    own = engine()
    with own.together("nothing happened"):
        pass
    for failing in range(world_size):
        with pytest.raises(CheckpointError) as error:
            fail_from(failing, own)
        more = world_size - failing - 1
        others = f" (and {more} more ranks)" if more else ""
        where = f"rank {failing}{others}: " if world_size > 1 else ""
        assert str(error.value) == f"it was not done: {where}the reason of {failing}."
        assert isinstance(error.value.__cause__, ValueError) == (own.crew.rank >= failing)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device", "a/b"), "No space left on device (a/b)"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (ValueError("two words."), "two words"),
        (KeyError("name"), "KeyError: 'name'"),
    ],
)
def test_errors_are_told_in_words(error: Exception, said: str) -> None:
    with pytest.raises(CheckpointError, match="not done") as told, engine().together("not done"):
        raise error
    assert str(told.value) == f"not done: {said}."


def test_an_interruption_by_the_user_is_passed_on() -> None:
    with pytest.raises(KeyboardInterrupt), engine().together("not done"):
        raise KeyboardInterrupt


@ranks(2)
def test_everybody_hears_what_the_leader_and_the_others_say() -> None:
    crew = engine().crew
    assert crew.gather({"rank": crew.rank}) == [{"rank": 0}, {"rank": 1}]
    said: Any = "token" if crew.rank == 0 else None
    assert crew.from_leader(said) == "token"
    assert crew.leads == (crew.rank == 0)


def test_a_report_says_what_there_is_to_say() -> None:
    clean = LoadReport(path="ckpt", step=12)
    assert clean
    assert str(clean) == "Loaded ckpt (step 12)"
    assert clean.differences == []
    report = LoadReport(path="ckpt", missing=["a (a.bin)"], extra=["b (b.bin)"], changes=["c"])
    assert report
    assert report.differences == ["missing in ckpt: a (a.bin)", "in ckpt, but not prepared here: b (b.bin)", "c"]
    assert str(report).splitlines() == ["Loaded ckpt", *report.differences]
