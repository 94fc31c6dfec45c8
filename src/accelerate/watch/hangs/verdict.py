"""Who keeps the others waiting, and which rule was broken: judged from the reports of all ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from ..place import BACKWARD
from ..reports import Report, listed

logger = logging.getLogger(__name__)

_SAME_CALLS = "Every rank must make the same calls in the same order."


# Operations that one rank may have left while others are still in them, or that are called by different names.
_ONE_SIDED = ("broadcast", "reduce", "scatter", "gather", "send", "recv", "isend", "irecv", "batch_isend_irecv")
_PAIRWISE = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
_SAME_SHAPES = ("all_reduce", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "broadcast")
_SURE = 0.5
"""A part of the threshold: ranks in different calls for less time than that may be about to go on."""


@dataclass(frozen=True)
class Verdict:
    """What everybody is told."""

    fatal: bool
    """Whether waiting on is useless."""
    culprits: list[int]
    text: str
    leaves_first: int = -1
    """The rank that ends its process if its wait cannot be ended otherwise."""
    again_in: float = 0.0
    """Seconds after which a suspicion that was too young is looked at again; nothing is said until then."""

    def log_a_notice(self) -> None:
        """Say it if the run waits on; what is fatal is raised instead."""
        if not self.fatal and self.text:
            logger.warning("%s", self.text)

    def to_json(self) -> str:
        """Write it down for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Verdict:
        """Read what the judge wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Absence:
    """A rank without a report."""

    how: str
    """As a sentence goes on after "rank 3": "is dead (process 17)"."""
    for_good: bool


_Finding = tuple[list[Report], list[int], str]
"""Whose calls disagree, who is to blame, and the rule that was broken."""


def judge(
    reports: Mapping[int, Report], absent: Mapping[int, Absence], threshold: float, *, all_are_known: bool = True
) -> Verdict:
    """Find the cause; a verdict that is not fatal is a notice, and the run waits on."""
    waiting = [report for report in reports.values() if report.waits]
    elsewhere = [report for report in reports.values() if not report.waits]
    if not waiting:  # whoever raised the alarm has gone on
        return Verdict(False, [], "")
    debugged = any(report.is_debugged for report in elsewhere)
    somebody_may_come = not all_are_known or bool(elsewhere) or not all(each.for_good for each in absent.values())
    finding = None if debugged else _mismatch(waiting, somebody_may_come)
    if finding is not None:
        concerned, culprits, rule = finding
        age = min(report.still for report in concerned if not report.lost or report.still > 0)
        if not any(report.lost for report in concerned) and age < _SURE * threshold:
            return Verdict(False, culprits, "", again_in=_SURE * threshold - age)
    else:
        gone = _somebody_is_gone(waiting, absent, somebody_may_come) or (
            None if debugged else _deadlock(waiting, elsewhere, threshold)
        )
        if gone is None:
            missing = sorted([*absent, *(report.rank for report in elsewhere)])
            return Verdict(False, missing, _told(reports, absent, _notice(waiting, elsewhere, absent)))
        culprits, rule = gone
    return Verdict(True, culprits, _told(reports, absent, rule), max((r.rank for r in waiting), default=-1))


def _mismatch(waiting: list[Report], somebody_may_come: bool) -> _Finding | None:
    """Find ranks that wait for each other in different calls, or in one call with different shapes."""
    by_members: dict[tuple[int, ...], list[Report]] = {}
    for report in waiting:
        if report.place.at_the_store and somebody_may_come:
            continue  # it may wait for that one only: those who have had their turn wait elsewhere by now
        if not report.in_a_pass or not report.in_parts:  # else nobody knows whom the pass waits for
            by_members.setdefault(tuple(report.place.members or ()), []).append(report)
    everybody = by_members.pop((), [])
    for members, part in by_members.items():
        # Ranks of a part that wait for all ranks are needed by the part, and need it.
        finding = _different_calls([*part, *(report for report in everybody if report.rank in members)])
        if finding is not None:
            return finding
    for together in (everybody, *by_members.values()):
        finding = _different_calls(together) or _different_shapes(together)
        if finding is not None:
            return finding
    return None


def _different_calls(together: list[Report]) -> _Finding | None:
    by_call: dict[tuple[object, ...], list[Report]] = {}
    for report in together:
        if _operation(report) not in _PAIRWISE:
            by_call.setdefault((_operation(report), *(report.place.members or ())), []).append(report)
    if len(by_call) < 2:
        return None
    if any(_operation(group[0]) in _ONE_SIDED for group in by_call.values()) and len({r.begun for r in together}) > 1:
        return None  # the root of a broadcast goes on while the others still receive
    # The fewest are wrong; of equally many, those whose call depends on the rank, then those that are behind.
    odd = min(by_call.values(), key=lambda group: (len(group), not group[0].place.guard, group[0].begun))
    others = next(group for group in by_call.values() if group is not odd)
    culprits = [report.rank for report in odd]
    place, there = odd[0].place, others[0].place
    rule = (
        f"{place.call or place.phase} was called on {listed(culprits).lower()} only ({place.where()}), while "
        f"{listed(r.rank for r in others).lower()} wait{_s(others)} in {there.call or there.phase} ({there.where()})"
    )
    if place.guard:
        rule += f": {place.where()} is inside {place.guard}. Move the call out of the condition"
    else:
        rule += ". Look for a condition that differs between ranks, a loop that ends earlier on one (a `break`, a "
        rule += "shorter loader: see join_uneven_inputs()), or an exception that was caught there"
        if there.phase == BACKWARD:
            rule += "; or parameters that took no part in the loss there (find_unused_parameters=True)"
    return [*odd, *others], culprits, f"{rule}. {_SAME_CALLS}"


def _different_shapes(together: list[Report]) -> _Finding | None:
    by_shape: dict[str, list[Report]] = {}
    for report in together:
        if _operation(report) in _SAME_SHAPES:
            by_shape.setdefault(report.place.operation, []).append(report)
    if len(by_shape) < 2 or len({_operation(report) for report in together}) > 1:
        return None
    odd = min(by_shape.values(), key=len)
    brought = "; ".join(f"{listed(r.rank for r in group).lower()}: {shape}" for shape, group in by_shape.items())
    rule = (
        f"The ranks bring different shapes to {odd[0].place.call or 'one call'} ({odd[0].place.where()}): {brought}. "
        "Make them equal with accelerator.pad_across_processes(), or use gather_object() for ragged data."
    )
    return [report for group in by_shape.values() for report in group], [report.rank for report in odd], rule


def _somebody_is_gone(
    waiting: list[Report], absent: Mapping[int, Absence], somebody_may_come: bool
) -> tuple[list[int], str] | None:
    if somebody_may_come:  # and it may be all that some of them wait for
        waiting = [report for report in waiting if report.lost or not _needs_some_only(report)]
    needed = [rank for rank in sorted(absent) if any(rank in (r.place.members or (rank,)) for r in waiting)]
    gone = [rank for rank in needed if absent[rank].for_good]
    if not gone and any(report.lost for report in waiting):
        gone = needed  # out of sight, and the connection to somebody is closed
    if not gone:
        return None
    how = min((absent[rank].how for rank in gone), key=lambda how: not how.startswith("has failed"))
    waited_for = [rank for rank in gone if absent[rank].how == how]
    rule = (
        f"{listed(waited_for)} {how}, and {listed(r.rank for r in waiting).lower()} wait{_s(waiting)} for "
        f"{'it' if len(waited_for) == 1 else 'them'} in {_calls_of(waiting)}."
    )
    if not absent[waited_for[0]].for_good:
        rule += " A connection has been closed, and no other rank is missing."
    if how.startswith("has left"):
        rule += f" {_advice_for_those_left(waiting)} {_SAME_CALLS}"
    return waited_for, rule


def _advice_for_those_left(waiting: list[Report]) -> str:
    """Say what to change where some ranks wait for one whose script has ended."""
    guarded = next((report.place for report in waiting if report.place.guard), None)
    if guarded is not None:
        return f"{guarded.where()} is inside {guarded.guard}. Move the call out of the condition."
    if any(report.in_a_pass for report in waiting):
        return (
            "The ranks take different numbers of steps. Hand the data loader to prepare(), which gives every rank as "
            "many batches; put the loop inside join_uneven_inputs(); or let all ranks leave it together: see "
            "set_trigger()."
        )
    return (
        "A loop or script that ends earlier on one rank (a `break`, a shorter loader, sys.exit) has to end on all of "
        "them: see set_trigger() and join_uneven_inputs()."
    )


def _needs_some_only(report: Report) -> bool:
    """Tell whether a rank may wait for a part of the others, without anybody knowing for which."""
    return _operation(report) in _ONE_SIDED or (report.in_a_pass and report.in_parts)


def _deadlock(waiting: list[Report], elsewhere: list[Report], threshold: float) -> tuple[list[int], str] | None:
    locked = [report for report in elsewhere if report.at_a_lock and report.idle >= _SURE * threshold]
    if not waiting or not locked:
        return None
    return [report.rank for report in locked], (
        f"{listed(r.rank for r in locked)} wait{_s(locked)} at a lock ({locked[0].place.where()}) and nothing there "
        f"computes, while {listed(r.rank for r in waiting).lower()} wait{_s(waiting)} in {_calls_of(waiting)}. A lock "
        "must not be held, or waited for, across a call that all ranks make."
    )


def _notice(waiting: list[Report], elsewhere: list[Report], absent: Mapping[int, Absence]) -> str:
    for rank, absence in absent.items():
        if not absence.for_good or not elsewhere:
            return f"Rank {rank} {absence.how}. The others wait."
    if not elsewhere:
        return "All ranks are in the same call: the network is slow, or the backend is stuck. They wait on."
    seen = next((report for report in elsewhere if report.is_debugged), elsewhere[0])
    who = [seen] if seen.is_debugged else elsewhere
    doing = "in a debugger" if seen.is_debugged else "busy"
    return (
        f"{listed(r.rank for r in who)} {'is' if len(who) == 1 else 'are'} {doing} at {seen.place.where()} "
        f"({seen.place.call or seen.place.phase}); {listed(r.rank for r in waiting).lower()} wait{_s(waiting)} in "
        f"{_calls_of(waiting)}. The run continues when {'it arrives' if len(who) == 1 else 'they arrive'}."
    )


def _told(reports: Mapping[int, Report], absent: Mapping[int, Absence], rule: str) -> str:
    lines: dict[str, list[int]] = {}
    seconds: dict[str, float] = {}
    for rank, report in sorted(reports.items()):
        shown = report.place.shown()
        lines.setdefault(shown, []).append(rank)
        seconds[shown] = max(seconds.get(shown, 0.0), report.still)
    for rank, absence in sorted(absent.items()):
        lines.setdefault(absence.how, []).append(rank)
    labels = {shown: listed(ranks).lower() for shown, ranks in lines.items()}
    width = max(map(len, labels.values()), default=0)
    table = "\n".join(
        f"  {labels[shown]:<{width}}  {shown}" + (f", for {seconds[shown]:.0f} s" if shown in seconds else "")
        for shown in lines
    )
    return f"{rule}\n{table}{_recorded(reports)}"


def _recorded(reports: Mapping[int, Report]) -> str:
    """Add what torch's flight recorder says, where it is on."""
    by_text: dict[str, list[int]] = {}
    for rank, report in sorted(reports.items()):
        if report.recorded:
            by_text.setdefault(report.recorded, []).append(rank)
    return "".join(f"\n  recorded on {listed(ranks).lower()}: {text}" for text, ranks in by_text.items())


def _operation(report: Report) -> str:
    """Name what a rank waits in; both passes of a model count as one, because a bucket may start in either."""
    return report.place.operation.partition("(")[0] or ("a pass" if report.in_a_pass else report.place.call)


def _calls_of(reports: Iterable[Report]) -> str:
    places = {f"{report.place.call or report.place.phase} ({report.place.where()})" for report in reports}
    return " and ".join(sorted(places)) or "nothing"


def _s(reports: list[Report]) -> str:
    return "s" if len(reports) == 1 else ""
