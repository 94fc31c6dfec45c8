"""Find the culprit of a hang, and the rule that was broken, from the reports of all ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

from ...untrusted import build, parse_json, printable_lines
from ..place import BACKWARD, FORWARD, Place
from ..reports import ProcessReport, format_ranks

logger = logging.getLogger(__name__)

_SAME_CALLS = "Every rank must make the same calls in the same order."


# Operations that one rank may have finished while others are still in them, or that have different names per rank.
_ONE_SIDED = ("broadcast", "reduce", "scatter", "gather", "send", "recv", "isend", "irecv", "batch_isend_irecv")
_PAIRWISE = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
_SAME_SHAPES = ("all_reduce", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "broadcast")
_CONFIRMED_AFTER = 0.5
"""Fraction of the threshold: ranks that are in different calls for less time may still proceed."""


@dataclass(frozen=True)
class HangVerdict:
    """The diagnosis that all ranks receive."""

    fatal: bool
    """Whether waiting longer is useless."""
    culprits: list[int]
    text: str
    exits_first: int = -1
    """The rank that ends its process if its wait cannot be interrupted."""
    recheck_in: float = 0.0
    """Seconds after which an unconfirmed suspicion is checked again; nothing is reported before that."""

    def log_notice(self) -> None:
        """Log the text of a verdict that is not fatal; a fatal one is raised instead."""
        if not self.fatal and self.text:
            logger.warning("%s", self.text)

    def to_json(self) -> str:
        """Serialize for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> HangVerdict:
        """Read what the coordinator published."""
        found = build(cls, parse_json(text, "the verdict on a hang"), "the verdict on a hang")
        return replace(found, text=printable_lines(found.text))


@dataclass(frozen=True)
class Absence:
    """The state of a rank that sent no report."""

    state: str
    """A predicate to follow "rank 3": "is dead (process 17)"."""
    is_final: bool


@dataclass(frozen=True)
class _Hang:
    """All reports of one hang, grouped by what the ranks do."""

    waiting: list[ProcessReport]
    running: list[ProcessReport]
    absent: Mapping[int, Absence]
    threshold: float
    more_may_arrive: bool
    """Whether a rank that is not waiting yet may still join."""

    @property
    def in_debugger(self) -> bool:
        return any(report.in_debugger for report in self.running)


@dataclass(frozen=True)
class _Finding:
    """The culprits of a hang, and the rule that they broke."""

    culprits: list[int]
    rule: str
    mismatched: tuple[ProcessReport, ...] = ()
    """Reports of calls that disagree. They may be a snapshot of ranks that are about to proceed."""

    def seconds_until_confirmed(self, threshold: float) -> float:
        """Return how long the disagreement must still last; 0 if it is certain."""
        if not self.mismatched or any(report.lost_peer for report in self.mismatched):
            return 0.0
        age = min(report.stalled_seconds for report in self.mismatched)
        return max(0.0, _CONFIRMED_AFTER * threshold - age)


def judge(
    reports: Mapping[int, ProcessReport], absent: Mapping[int, Absence], threshold: float, *, all_known: bool = True
) -> HangVerdict:
    """Find the cause of a hang. A verdict that is not fatal is a notice: the run keeps waiting.

    `all_known` is False if some ranks are in neither `reports` nor `absent`.
    """
    hang = _group_reports(reports, absent, threshold, all_known)
    if not hang.waiting:  # the rank that raised the alarm has proceeded
        return HangVerdict(False, [], "")
    finding = _find_cause(hang)
    if finding is None:
        missing = sorted([*absent, *(report.rank for report in hang.running)])
        return HangVerdict(False, missing, _format_text(reports, absent, _notice(hang)))
    recheck_in = finding.seconds_until_confirmed(threshold)
    if recheck_in > 0:
        return HangVerdict(False, finding.culprits, "", recheck_in=recheck_in)
    exits_first = max(report.rank for report in hang.waiting)
    return HangVerdict(True, finding.culprits, _format_text(reports, absent, finding.rule), exits_first)


def _group_reports(
    reports: Mapping[int, ProcessReport], absent: Mapping[int, Absence], threshold: float, all_known: bool
) -> _Hang:
    waiting = [report for report in reports.values() if report.is_waiting]
    running = [report for report in reports.values() if not report.is_waiting]
    all_accounted_for = all_known and not running and all(absence.is_final for absence in absent.values())
    return _Hang(waiting, running, absent, threshold, more_may_arrive=not all_accounted_for)


def _find_cause(hang: _Hang) -> _Finding | None:
    """Apply the rules in order; a rank that is stopped in a debugger excuses all others but missing ones."""
    if hang.in_debugger:
        return _missing_ranks(hang)
    return _mismatch(hang) or _missing_ranks(hang) or _deadlock(hang)


def _mismatch(hang: _Hang) -> _Finding | None:
    """Find ranks that wait for each other in different calls, or in one call with different shapes."""
    by_group: dict[tuple[int, ...], list[ProcessReport]] = {}
    for report in hang.waiting:
        if report.place.at_store and hang.more_may_arrive:
            continue  # it may wait for that rank only; ranks that were released earlier wait elsewhere by now
        if not report.in_pass or not report.has_subgroups:  # else it is unknown which ranks the pass waits for
            by_group.setdefault(tuple(report.place.group_ranks or ()), []).append(report)
    world = by_group.pop((), [])
    for ranks, members in by_group.items():
        # Members of a subgroup that wait for the world block the subgroup, and the subgroup blocks them.
        finding = _different_calls([*members, *(report for report in world if report.rank in ranks)])
        if finding is not None:
            return finding
    for members in (world, *by_group.values()):
        finding = _different_calls(members) or _different_shapes(members)
        if finding is not None:
            return finding
    return None


def _different_calls(reports: list[ProcessReport]) -> _Finding | None:
    by_call = _group_by_call(reports)
    outstanding = {report.outstanding for report in reports}
    if len(by_call) < 2 or len(outstanding - {None}) > 1:
        return None  # the same, or one rank's device is still in an earlier collective: there is more to come
    # Behind a collective of the device, ranks may have started different numbers of others.
    started = outstanding if None not in outstanding else {report.collectives_started for report in reports}
    if len(started) > 1 and any(_operation(calls[0]) in _ONE_SIDED for calls in by_call):
        return None  # the root of a broadcast proceeds while the others still receive
    # The minority is wrong; on a tie, the call inside a condition on the rank, then the one that is behind.
    odd = min(by_call, key=lambda calls: (len(calls), not calls[0].place.guard, calls[0].collectives_started))
    others = next(calls for calls in by_call if calls is not odd)
    return _Finding([report.rank for report in odd], _rule_of_different_calls(odd, others), (*odd, *others))


def _group_by_call(reports: list[ProcessReport]) -> list[list[ProcessReport]]:
    """Group reports by operation and process group; point-to-point operations match under different names."""
    by_call: dict[tuple[object, ...], list[ProcessReport]] = {}
    for report in reports:
        if _operation(report) not in _PAIRWISE:
            by_call.setdefault((_operation(report), *(report.place.group_ranks or ())), []).append(report)
    return list(by_call.values())


def _rule_of_different_calls(odd: list[ProcessReport], others: list[ProcessReport]) -> str:
    here, there = odd[0].place, others[0].place
    rule = (
        f"{_call_or_phase(here)} was called on {_ranks_of(odd).lower()} only ({here.location()}), while "
        f"{_ranks_of(others).lower()} wait{_s(others)} in {_call_or_phase(there)} ({there.location()})"
    )
    if here.guard:
        rule += f": {here.location()} is inside {here.guard}. Move the call out of the condition"
    else:
        rule += ". Look for a condition that differs between ranks, a loop that ends earlier on one (a `break`, a "
        rule += "shorter loader: see join_uneven_inputs()), or an exception that was caught there"
        if there.phase == BACKWARD:
            rule += "; or parameters that took no part in the loss there (find_unused_parameters=True)"
    return f"{rule}. {_SAME_CALLS}"


def _different_shapes(reports: list[ProcessReport]) -> _Finding | None:
    by_shape: dict[str, list[ProcessReport]] = {}
    for report in reports:
        if _operation(report) in _SAME_SHAPES:
            by_shape.setdefault(report.place.operation, []).append(report)
    if len(by_shape) < 2 or len({_operation(report) for report in reports}) > 1:
        return None
    if len({report.outstanding for report in reports}) > 1:
        return None  # calls of different numbers, or shapes as the recorder words them beside those of the host
    odd = min(by_shape.values(), key=len)
    place = odd[0].place
    shapes = "; ".join(f"{_ranks_of(group).lower()}: {shape}" for shape, group in by_shape.items())
    rule = (
        f"The ranks bring different shapes to {place.call or 'one call'} ({place.location()}): {shapes}. "
        "Make them equal with accelerator.pad_across_processes(), or use gather_object() for ragged data."
    )
    mismatched = tuple(report for group in by_shape.values() for report in group)
    return _Finding([report.rank for report in odd], rule, mismatched)


def _missing_ranks(hang: _Hang) -> _Finding | None:
    """Find ranks that will not arrive, and that others wait for."""
    waiting = hang.waiting
    if hang.more_may_arrive:  # a rank that arrives later may be all that some of them wait for
        waiting = [report for report in waiting if report.lost_peer or not _has_unknown_peers(report)]
    missing = _final_absences(waiting, hang.absent)
    if not missing:
        return None
    states = [hang.absent[rank].state for rank in missing]
    state = next((state for state in states if state.startswith("has failed")), states[0])
    culprits = [rank for rank in missing if hang.absent[rank].state == state]
    rule = (
        f"{format_ranks(culprits)} {state}, and {_ranks_of(waiting).lower()} wait{_s(waiting)} for "
        f"{'it' if len(culprits) == 1 else 'them'} in {_format_calls(waiting)}."
    )
    if not hang.absent[culprits[0]].is_final:
        rule += " A connection has been closed, and no other rank is missing."
    if state.startswith("has left"):
        rule += f" {_advice_after_early_exit(waiting)} {_SAME_CALLS}"
    return _Finding(culprits, rule)


def _final_absences(waiting: list[ProcessReport], absent: Mapping[int, Absence]) -> list[int]:
    """Return the absent ranks that are waited for and will not come back."""
    needed = [rank for rank in sorted(absent) if any(_waits_for(report, rank) for report in waiting)]
    final = [rank for rank in needed if absent[rank].is_final]
    if not final and any(report.lost_peer for report in waiting):
        return needed  # their state is unknown, but a connection to one of them is closed
    return final


def _waits_for(report: ProcessReport, rank: int) -> bool:
    return not report.place.group_ranks or rank in report.place.group_ranks


def _advice_after_early_exit(waiting: list[ProcessReport]) -> str:
    """Return what to change where some ranks wait for one whose script has ended."""
    guarded = next((report.place for report in waiting if report.place.guard), None)
    if guarded is not None:
        return f"{guarded.location()} is inside {guarded.guard}. Move the call out of the condition."
    if any(report.place.phase in (BACKWARD, FORWARD) for report in waiting):
        return (
            "The ranks take different numbers of steps. Hand the data loader to prepare(), which gives every rank as "
            "many batches; put the loop inside join_uneven_inputs(); or let all ranks leave it together: see "
            "set_trigger()."
        )
    return (
        "A loop or script that ends earlier on one rank (a `break`, a shorter loader, sys.exit) has to end on all of "
        "them: see set_trigger() and join_uneven_inputs()."
    )


def _has_unknown_peers(report: ProcessReport) -> bool:
    """Return whether a rank may wait for a subset of the others that is unknown."""
    return _operation(report) in _ONE_SIDED or (report.in_pass and report.has_subgroups)


def _deadlock(hang: _Hang) -> _Finding | None:
    """Find ranks that hang at a lock while the others wait for them."""
    min_idle = _CONFIRMED_AFTER * hang.threshold
    locked = [report for report in hang.running if report.at_lock and report.idle_seconds >= min_idle]
    if not locked:
        return None
    rule = (
        f"{_ranks_of(locked)} wait{_s(locked)} at a lock ({locked[0].place.location()}) and nothing there "
        f"computes, while {_ranks_of(hang.waiting).lower()} wait{_s(hang.waiting)} in {_format_calls(hang.waiting)}. "
        "A lock must not be held, or waited for, across a call that all ranks make."
    )
    return _Finding([report.rank for report in locked], rule)


def _notice(hang: _Hang) -> str:
    """Return why the run keeps waiting."""
    for rank, absence in hang.absent.items():
        if not absence.is_final or not hang.running:
            return f"Rank {rank} {absence.state}. The others wait."
    if not hang.running and len(_group_by_call(hang.waiting)) > 1:
        calls = _format_calls(hang.waiting)
        return f"The ranks are in different calls, which need not wait for each other: {calls}. They wait on."
    if not hang.running:
        return "All ranks are in the same call: the network is slow, or the backend is stuck. They wait on."
    first = next((report for report in hang.running if report.in_debugger), hang.running[0])
    late = [first] if first.in_debugger else hang.running
    activity = "in a debugger" if first.in_debugger else "busy"
    return (
        f"{_ranks_of(late)} {'is' if len(late) == 1 else 'are'} {activity} at {first.place.location()} "
        f"({_call_or_phase(first.place)}); {_ranks_of(hang.waiting).lower()} wait{_s(hang.waiting)} in "
        f"{_format_calls(hang.waiting)}. The run continues when {'it arrives' if len(late) == 1 else 'they arrive'}."
    )


def _format_text(reports: Mapping[int, ProcessReport], absent: Mapping[int, Absence], rule: str) -> str:
    """Return the rule, and below it a table of what every rank does."""
    lines: dict[str, list[int]] = {}
    seconds: dict[str, float] = {}
    for rank, report in sorted(reports.items()):
        line = report.place.describe()
        lines.setdefault(line, []).append(rank)
        seconds[line] = max(seconds.get(line, 0.0), report.stalled_seconds)
    for rank, absence in sorted(absent.items()):
        lines.setdefault(absence.state, []).append(rank)
    labels = {line: format_ranks(ranks).lower() for line, ranks in lines.items()}
    width = max(map(len, labels.values()), default=0)
    table = "\n".join(
        f"  {labels[line]:<{width}}  {line}" + (f", for {seconds[line]:.0f} s" if line in seconds else "")
        for line in lines
    )
    return f"{rule}\n{table}{_format_flight_records(reports)}"


def _format_flight_records(reports: Mapping[int, ProcessReport]) -> str:
    """Return what torch's flight recorder holds, where it is enabled."""
    by_text: dict[str, list[int]] = {}
    for rank, report in sorted(reports.items()):
        if report.flight_record:
            by_text.setdefault(report.flight_record, []).append(rank)
    return "".join(f"\n  recorded on {format_ranks(ranks).lower()}: {text}" for text, ranks in by_text.items())


def _operation(report: ProcessReport) -> str:
    """Name what a rank waits in; both passes of a model are one operation, because a bucket may start in either."""
    return report.place.operation.partition("(")[0] or ("a pass" if report.in_pass else report.place.call)


def _call_or_phase(place: Place) -> str:
    return place.call or place.phase


def _format_calls(reports: Iterable[ProcessReport]) -> str:
    calls = {f"{_call_or_phase(report.place)} ({report.place.location()})" for report in reports}
    return " and ".join(sorted(calls)) or "nothing"


def _ranks_of(reports: Iterable[ProcessReport]) -> str:
    return format_ranks(report.rank for report in reports)


def _s(reports: list[ProcessReport]) -> str:
    """Return the ending of a verb."""
    return "s" if len(reports) == 1 else ""
