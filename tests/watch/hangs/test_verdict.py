"""The judge, on reports written by hand."""

from __future__ import annotations

from meshwright.watch.hangs.verdict import Absence, HangVerdict, judge
from meshwright.watch.place import BACKWARD, COLLECTIVE, DEBUGGER, FORWARD, USER_CODE, Place
from meshwright.watch.reports import ProcessReport

THRESHOLD = 30.0


def at(
    rank: int,
    operation: str = "all_reduce(float32[3])",
    *,
    phase: str = COLLECTIVE,
    stalled: float = THRESHOLD,
    group: list[int] | None = None,
    guard: str = "",
    started: int = 7,
    subgroups: bool = False,
    at_lock: bool = False,
    idle: float = THRESHOLD,
    lost_peer: bool = False,
    at_store: bool = False,
    outstanding: str | None = None,
) -> ProcessReport:
    call = f"{operation.partition('(')[0]}()" if phase == COLLECTIVE else ""
    operation = operation if phase == COLLECTIVE else ""
    place = Place(phase, call, operation, "/home/me/train.py", 10 + rank, "source", guard, group, at_store=at_store)
    return ProcessReport(
        rank,
        place,
        stalled,
        idle,
        at_lock=at_lock,
        lost_peer=lost_peer,
        collectives_started=started,
        has_subgroups=subgroups,
        is_async=outstanding is not None,
        outstanding=outstanding,
    )


def judged(*reports: ProcessReport, absent: dict[int, Absence] | None = None) -> HangVerdict:
    return judge({report.rank: report for report in reports}, absent or {}, THRESHOLD)


def test_the_fewest_are_to_blame() -> None:
    verdict = judged(at(0), at(1, "barrier()"), at(2), at(3))
    assert (verdict.fatal, verdict.culprits, verdict.exits_first) == (True, [1], 3)
    assert "barrier() was called on rank 1 only (train.py:11)" in verdict.text


def test_of_two_the_call_behind_a_condition_is_to_blame() -> None:
    verdict = judged(at(0), at(1, "barrier()", guard="`if is_main_process:` (line 9)"))
    assert (verdict.fatal, verdict.culprits) == (True, [1])
    assert "train.py:11 is inside `if is_main_process:` (line 9)" in verdict.text


def test_both_passes_of_a_model_are_one_call() -> None:
    assert not judged(at(0, phase=FORWARD), at(1, phase=BACKWARD)).fatal


def test_a_disagreement_that_is_young_is_looked_at_again_without_a_word() -> None:
    verdict = judged(at(0), at(1, "barrier()", stalled=2.0))
    assert (verdict.fatal, verdict.text, verdict.recheck_in) == (False, "", 13.0)


def test_parts_of_the_ranks_may_be_in_different_calls() -> None:
    assert not judged(at(0, group=[0, 1]), at(1, group=[0, 1]), at(2, "barrier()", group=[2, 3])).fatal


def test_a_rank_that_waits_for_all_while_its_part_waits_for_it() -> None:
    verdict = judged(at(0, group=[0, 1]), at(1, "barrier()"), at(2, "barrier()"), at(3, "barrier()"))
    assert verdict.fatal


def test_a_pass_in_a_run_with_parts_blames_nobody() -> None:
    assert not judged(at(0, phase=BACKWARD, subgroups=True), at(1, "barrier()", subgroups=True)).fatal


def test_sending_and_receiving_are_no_disagreement() -> None:
    assert not judged(at(0, "send(float32[3])"), at(1, "recv(float32[3])")).fatal


def test_the_root_of_a_broadcast_may_be_ahead() -> None:
    assert not judged(at(0, started=8), at(1, "broadcast(float32[3])"), at(2, "broadcast(float32[3])")).fatal
    assert judged(at(0), at(1, "broadcast(float32[3])"), at(2, "broadcast(float32[3])")).fatal


def test_different_shapes_where_they_must_be_equal() -> None:
    verdict = judged(at(0), at(1, "all_reduce(float32[4])"), at(2))
    assert (verdict.fatal, verdict.culprits) == (True, [1])
    assert "rank 1: all_reduce(float32[4])" in verdict.text
    assert not judged(at(0, "all_to_all(float32[3])"), at(1, "all_to_all(float32[4])")).fatal


def test_a_rank_that_computes_is_waited_for() -> None:
    verdict = judged(at(0, phase=USER_CODE, stalled=0.1), at(1), at(2))
    assert (verdict.fatal, verdict.culprits) == (False, [0])
    assert "Rank 0 is busy at train.py:10" in verdict.text


def test_a_pass_that_computes_does_not_wait() -> None:
    verdict = judged(at(0, phase=BACKWARD, idle=0.1), at(1, "barrier()"))
    assert (verdict.fatal, verdict.culprits) == (False, [0])
    assert judged(at(0, phase=BACKWARD), at(1, "barrier()")).fatal


def test_a_wait_at_the_store_lasts_as_long_as_a_rank_may_arrive() -> None:
    """Rank 0 was released and is ahead; rank 1 waits at the store until rank 2 has arrived."""
    waits, ahead = at(1, "main_process_first()", at_store=True), at(0, "barrier()")
    verdict = judged(ahead, waits, at(2, phase=USER_CODE, stalled=0.1))
    assert (verdict.fatal, verdict.culprits) == (False, [2])
    assert not judged(ahead, waits, absent={2: Absence("does not answer", is_final=False)}).fatal
    assert judged(ahead, waits).fatal


def test_nobody_is_blamed_when_nobody_waits() -> None:
    verdict = judged(at(0, phase=USER_CODE, stalled=0.1), at(1, stalled=0.1))
    assert (verdict.fatal, verdict.text) == (False, "")


def test_nobody_is_ended_while_one_is_in_a_debugger() -> None:
    verdict = judged(at(0, phase=DEBUGGER), at(1), at(2, "barrier()"))
    assert not verdict.fatal
    assert "Rank 0 is in a debugger at train.py:10" in verdict.text


def test_a_lock_is_a_deadlock_only_when_nothing_computes() -> None:
    assert judged(at(0, phase=USER_CODE, at_lock=True), at(1)).fatal
    assert not judged(at(0, phase=USER_CODE, at_lock=True, idle=1.0), at(1)).fatal


def test_a_missing_rank_matters_to_those_who_wait_for_it() -> None:
    missing = {3: Absence("is dead (process 5)", is_final=True)}
    assert judged(at(0), at(1), absent=missing).culprits == [3]
    assert not judged(at(0, group=[0, 1]), at(1, group=[0, 1]), absent=missing).fatal
    stopped = {3: Absence("is stopped (process 5)", is_final=False)}
    assert not judged(at(0), at(1), absent=stopped).fatal


def test_a_missing_rank_does_not_matter_to_a_call_that_may_wait_for_another() -> None:
    left = {3: Absence("has left: its script has ended", is_final=True)}
    busy = at(2, phase=USER_CODE, stalled=0.1)
    for waits in (at(1, "recv(float32[3])"), at(1, "gather(float32[3])"), at(1, phase=FORWARD, subgroups=True)):
        verdict = judged(waits, busy, absent=left)
        assert not verdict.fatal
        assert "Rank 2 is busy" in verdict.text
        assert judged(waits, absent=left).fatal
        assert not judge({1: waits}, left, THRESHOLD, all_known=False).fatal
    assert judged(at(1, "barrier()"), busy, absent=left).fatal


def test_an_unreachable_rank_is_missing_when_a_connection_was_closed() -> None:
    silent = {3: Absence("does not answer (process 5 on there)", is_final=False)}
    assert not judged(at(0), at(1), absent=silent).fatal
    verdict = judged(at(0), at(1, lost_peer=True), absent=silent)
    assert (verdict.fatal, verdict.culprits) == (True, [3])
    assert "Rank 3 does not answer (process 5 on there), and ranks 0-1 wait for it" in verdict.text


def test_of_several_missing_ranks_the_one_that_failed_is_named() -> None:
    missing = {2: Absence("is dead (process 5)", is_final=True), 3: Absence("has failed: ValueError: x", is_final=True)}
    verdict = judged(at(0), at(1), absent=missing)
    assert verdict.culprits == [3]
    assert verdict.text.startswith("Rank 3 has failed: ValueError: x, and ranks 0-1 wait for it")


def test_verdicts_and_reports_travel_as_text() -> None:
    report, verdict = at(1, group=[0, 1]), judged(at(0), at(1, "barrier()"))
    assert ProcessReport.from_json(report.to_json(), report.rank) == report
    assert HangVerdict.from_json(verdict.to_json()) == verdict


# --- asynchronous collectives -----------------------------------------------------------------------------------------


def test_different_calls_with_the_same_number_are_a_mismatch_on_a_device() -> None:
    verdict = judged(
        at(0, "all_gather_into_tensor(Float[4])", outstanding="0:7"), at(1, outstanding="0:7"), at(2, outstanding="0:7")
    )
    assert (verdict.fatal, verdict.culprits) == (True, [0])


def test_what_was_started_behind_a_collective_of_a_device_does_not_matter() -> None:
    verdict = judged(
        at(0, "all_gather_into_tensor(Float[4])", outstanding="0:7", started=8),
        at(1, "broadcast(Int[6])", outstanding="0:7"),
        at(2, "broadcast(Int[6])", outstanding="0:7"),
    )
    assert (verdict.fatal, verdict.culprits) == (True, [0])


def test_a_device_that_is_in_an_earlier_collective_is_waited_for() -> None:
    verdict = judged(
        at(0, "broadcast(Float[4])", outstanding="0:7"), at(1, outstanding="0:8"), at(2, outstanding="0:8")
    )
    assert not verdict.fatal
    assert verdict.text.startswith("The ranks are in different calls, which need not wait for each other: ")
    assert "all_reduce() (train.py:11)" in verdict.text


def test_a_rank_that_compiles_while_devices_wait_is_busy() -> None:
    verdict = judged(at(0, outstanding="0:7"), at(1, phase=FORWARD, idle=0.0), at(2, outstanding="0:7"))
    assert not verdict.fatal
    assert "Rank 1 is busy at train.py:11" in verdict.text


def test_shapes_of_the_recorder_are_not_compared_with_those_of_a_host() -> None:
    assert not judged(at(0, "all_reduce(Float[3])", outstanding="0:7"), at(1, "all_reduce(float32[3])")).fatal
