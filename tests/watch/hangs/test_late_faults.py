"""Faults of four processes whose collectives complete after Python has gone on: who is named, and which lines.

The devices are simulated: see `tests/simulated_accelerator`. Their collectives notice no lost peer, and a recorder as
NCCL's tells which of them have not completed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.simulated_accelerator.build import compiled, why_not
from tests.sizes import cases, sized

from . import test_faults
from .test_faults import line_of, read, run_once, verdicts

DISAGREEMENTS = test_faults.DISAGREEMENTS | {
    "gather_beside_values": ("rank 2", "is inside `if training.rank == 2 and index == 2:`"),
    "different_calls_in_a_subgroup": ("rank 3", "is inside `if training.rank == 3:`"),
}
MISSING = test_faults.MISSING | {
    "killed_beside_values": (1, "is dead"),
    "failed_beside_values": (1, "has failed: ValueError: bad sample"),
}
BUSY = {
    "busy_first_rank": "Rank 0 is busy at",
    "upload_in_a_thread": "Rank 0 is busy at",
    "late_for_main_process_first": "Rank 3 is busy at",
    "stopped": "Rank 1 is stopped (process",
    "compiling_in_forward": "Rank 2 is busy at",
    "busy_between_steps": "Rank 3 is busy at",
}
OTHERS = (
    *("late_and_exited", "ragged_shapes", "last_call_on_one_rank", "handled_exception", "lock_and_collective"),
    "healthy",
)
IN_THE_GATE = (  # four ranks each, with a thread per stream
    *("gather_beside_values", "killed_beside_values", "compiling_in_forward", "ragged_shapes"),
    *("different_order", "healthy"),
)
IN_THE_BACKWARD_PASS = (  # the host has gone on to a line that reads a value
    *("gather_beside_values", "killed_beside_values", "failed_beside_values"),
    *("compiling_in_forward", "busy_between_steps"),
)


def sized_cases(names: Iterable[str]) -> list[Any]:
    return cases(gate=(name for name in names if name in IN_THE_GATE), nightly=names)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    compiled()  # here, because it may take longer than a world
    names = [*DISAGREEMENTS, *MISSING, *BUSY, *OTHERS]
    return run_once(tmp_path_factory, "late_faults", sized(gate=IN_THE_GATE, nightly=names), on_devices=True)


@pytest.mark.parametrize("fault", sized_cases(DISAGREEMENTS))
def test_ranks_that_started_different_calls_learn_whose_call_it_was_on_simulated_accelerators(
    folder: Path, fault: str
) -> None:
    culprit, rule = DISAGREEMENTS[fault]
    for text in verdicts(read(folder, fault), {0, 1, 2, 3}):
        assert f"() was called on {culprit} only ({line_of(fault, 'CULPRIT')})" in text
        assert rule in text
        if fault in IN_THE_BACKWARD_PASS:
            assert f"wait in the backward pass ({line_of(fault, 'WAITS')})" in text


@pytest.mark.parametrize("fault", sized_cases(MISSING))
def test_ranks_that_wait_for_a_missing_one_learn_its_state_on_simulated_accelerators(folder: Path, fault: str) -> None:
    culprit, how = MISSING[fault]
    for text in verdicts(read(folder, fault), {0, 1, 2, 3} - {culprit}):
        assert f"Rank {culprit} {how}" in text
        if fault == "unused_parameters":  # the next pass begins before that of rank 1 is missed
            assert f"in the backward pass ({line_of(fault, 'CULPRIT')})" in text
        else:
            assert f"({line_of(fault, 'WAITS')})" in text
        if fault in IN_THE_BACKWARD_PASS:
            assert f"in the backward pass ({line_of(fault, 'WAITS')})" in text
        if "has " in how:
            assert line_of(fault, "CULPRIT") in text


@pytest.mark.parametrize("fault", sized_cases(BUSY))
def test_a_rank_that_may_come_back_is_waited_for_on_simulated_accelerators(folder: Path, fault: str) -> None:
    ended = read(folder, fault)
    assert [each.code for each in ended] == [0, 0, 0, 0], [each.printed for each in ended]
    printed = "".join(each.printed for each in ended)
    assert BUSY[fault] in printed
    assert "Error" not in printed
    assert line_of(fault, "WAITS") in printed
    if fault in IN_THE_BACKWARD_PASS:
        assert f"{BUSY[fault]} {line_of(fault, 'CULPRIT')}" in printed
        assert f"in the backward pass ({line_of(fault, 'WAITS')})" in printed


@pytest.mark.nightly
def test_nobody_is_judged_by_a_report_that_is_no_longer_true_on_simulated_accelerators(folder: Path) -> None:
    for each in read(folder, "late_and_exited"):
        assert each.code == 0, each.printed
        assert "Error" not in each.printed


@pytest.mark.nightly
def test_the_last_call_of_a_script_on_one_rank_is_reported_on_simulated_accelerators(folder: Path) -> None:
    (text,) = verdicts(read(folder, "last_call_on_one_rank"), {0})
    assert re.search(r"Ranks? .* ha(s|ve) left: its script has ended", text)
    where = line_of("_evaluate", "CULPRIT")
    assert f"{where} is inside `if training.accelerator.is_main_process:`" in text


def test_ragged_shapes_are_reported_by_rank_on_simulated_accelerators(folder: Path) -> None:
    ended = read(folder, "ragged_shapes")
    alive = {rank for rank in range(4) if ended[rank].code == 1}  # gloo itself aborts one that receives too much
    assert len(alive) >= 2
    for text in verdicts(ended, alive):
        assert f"different shapes to gather() ({line_of('ragged_shapes', 'CULPRIT')})" in text
        assert "rank 1: all_gather_into_tensor(Float[4])" in text


@pytest.mark.nightly
def test_an_exception_that_is_being_handled_is_named_on_simulated_accelerators(folder: Path) -> None:
    ended = read(folder, "handled_exception")
    verdicts(ended, {0, 1, 2, 3})
    where = line_of("handled_exception", "CULPRIT")
    for each in ended:
        assert f"while handling ValueError: bad sample ({where}" in each.printed


@pytest.mark.nightly
def test_a_lock_across_a_collective_on_simulated_accelerators(folder: Path) -> None:
    fault = "lock_and_collective"
    for text in verdicts(read(folder, fault), {0, 1, 2, 3}):
        assert f"Rank 1 waits at a lock ({line_of(fault, 'CULPRIT')})" in text
        assert re.search(rf"while ranks? .* waits? in wait_for_everyone\(\) \({line_of(fault, 'WAITS')}\)", text)


def test_what_the_recorder_has_is_attached_on_simulated_accelerators(folder: Path) -> None:
    for each in read(folder, "different_order"):
        recorded = re.findall(r"recorded on (.*): simulated:(\w+) number \d+", each.printed)
        culprit, others = sorted({ranks for ranks, _ in recorded}, key=lambda ranks: ranks != "rank 2")
        assert culprit == "rank 2"
        assert others in ("ranks 0-1, 3", "ranks 0, 3", "ranks 0-1", "ranks 1, 3"), "a late rank has no record yet"


def test_health_is_silent_on_simulated_accelerators(folder: Path) -> None:
    for each in read(folder, "healthy"):
        assert each.printed == "finished\n\nexit code 0", each.printed
