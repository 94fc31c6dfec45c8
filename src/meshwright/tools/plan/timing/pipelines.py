"""Replay the schedule of a pipeline from the seconds that every stage needs for a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..trace import BACKWARD, FORWARD, UPDATE, Trace
from .depth import combined
from .step import Timing

GPIPE, ONE_F_ONE_B, INTERLEAVED = "gpipe", "1f1b", "interleaved"


@dataclass(frozen=True)
class Stage:
    """Seconds of one micro-batch in one stage."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Action:
    """One pass of one micro-batch through one stage."""

    phase: str
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Replay:
    """What a schedule makes of its stages."""

    seconds: float
    """From the first forward pass to the end of the last backward pass of any rank."""
    busy: tuple[float, ...]
    """Seconds in which each rank computes."""
    in_flight: tuple[int, ...]
    """The most micro-batches whose activations each rank holds at once, over all of its stages."""

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time in which they wait for others."""
        total = self.seconds * len(self.busy)
        return 1 - sum(self.busy) / total if total else 0.0


@dataclass(frozen=True)
class PipelineTiming:
    """The step of a whole pipeline."""

    seconds: float
    replay: Replay
    mean: Timing
    """The mean of its ranks, over all micro-batches; it does not say how long the step takes."""


def replay(schedule: str, stages: Sequence[Stage], ranks: int, microbatches: int, message: float = 0.0) -> Replay:
    """Replay a schedule.

    Args:
        schedule: `gpipe`, `1f1b` or `interleaved`.
        stages: Every stage of the pipeline in its order; rank r has the stages r, r + ranks, …
        ranks: Ranks of the pipeline.
        microbatches: Micro-batches of a step.
        message: Seconds in which an activation or a gradient goes to the next stage.
    """
    orders = [order_of(schedule, rank, ranks, len(stages) // ranks, microbatches) for rank in range(ranks)]
    ends: dict[Action, float] = {}
    clocks, positions = [0.0] * ranks, [0] * ranks
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while positions[rank] < len(order):
                action = order[positions[rank]]
                ready = _ready(action, ends, len(stages), message)
                if ready is None:
                    break
                stage = stages[action.stage]
                seconds = stage.forward if action.phase == FORWARD else stage.backward
                clocks[rank] = ends[action] = max(clocks[rank], ready) + seconds
                positions[rank] += 1
                moved = True
    if any(position < len(order) for position, order in zip(positions, orders, strict=True)):
        raise ValueError(f"Schedule {schedule!r} cannot run {microbatches} micro-batches on {ranks} ranks.")
    busy = tuple(
        microbatches * sum(stage.forward + stage.backward for stage in stages[rank::ranks]) for rank in range(ranks)
    )
    return Replay(max(clocks), busy, tuple(map(_most_in_flight, orders)))


def time_pipeline(timings: Sequence[Timing], trace: Trace) -> PipelineTiming:
    """Return the step of a whole pipeline, from what each of its ranks does in its traced micro-batches.

    Args:
        timings: One of each rank of a pipeline, in their order.
        trace: Of any of these ranks.
    """
    ranks, traced, count = len(timings), trace.microbatches, trace.all_microbatches
    per_rank = max(1, trace.stages // ranks)
    own = [stage_of(timing, traced, per_rank) for timing in timings]
    sent = [(name, timing) for timing in timings for name in timing.calls if name.partition(" ")[0] == "send"]
    calls = sum(timing.calls[name] for name, timing in sent)
    message = sum(timing.communication[name] for name, timing in sent) / calls if calls else 0.0
    replayed = replay(trace.schedule or ONE_F_ONE_B, own * per_rank, ranks, count, message)
    update = max(timing.phases.get(UPDATE, 0.0) for timing in timings)
    mean = combined([(count / traced / ranks, timing) for timing in timings])
    return PipelineTiming(replayed.seconds + update, replayed, mean)


def stage_of(timing: Timing, microbatches: int, per_rank: int = 1) -> Stage:
    """Return the seconds of a micro-batch in one of a rank's stages, from a step of so many micro-batches."""
    passes = microbatches * per_rank
    return Stage(timing.phases.get(FORWARD, 0.0) / passes, timing.phases.get(BACKWARD, 0.0) / passes)


def order_of(schedule: str, rank: int, ranks: int, per_rank: int, microbatches: int) -> list[Action]:
    """Return what a rank does, in its order."""
    if schedule == GPIPE:
        return [Action(phase, rank, number) for phase in (FORWARD, BACKWARD) for number in range(microbatches)]
    if schedule == ONE_F_ONE_B:
        return _one_forward_one_backward(
            [Action(FORWARD, rank, number) for number in range(microbatches)],
            [Action(BACKWARD, rank, number) for number in range(microbatches)],
            warmup=ranks - rank,
        )
    if schedule == INTERLEAVED:
        per_round = microbatches // max(1, microbatches // ranks)
        return _one_forward_one_backward(
            _interleaved(FORWARD, rank, ranks, per_rank, microbatches, per_round),
            _interleaved(BACKWARD, rank, ranks, per_rank, microbatches, per_round),
            warmup=(per_rank - 1) * per_round + 2 * (ranks - 1 - rank) + 1,
        )
    raise ValueError(f"No schedule is called {schedule!r}: choose {GPIPE}, {ONE_F_ONE_B} or {INTERLEAVED}.")


def _one_forward_one_backward(forward: list[Action], backward: list[Action], warmup: int) -> list[Action]:
    """Merge the passes: some forward, then one backward and one forward in turn, then the rest backward."""
    warmup = min(warmup, len(forward))
    order = forward[:warmup]
    for number, action in enumerate(backward):
        order.append(action)
        order.extend(forward[warmup + number : warmup + number + 1])
    return order


def _interleaved(phase: str, rank: int, ranks: int, per_rank: int, microbatches: int, per_round: int) -> list[Action]:
    """Return the passes of a rank with several stages: rounds of micro-batches through one stage after the other."""
    stages = [rank + ranks * index for index in range(per_rank)]
    if phase == BACKWARD:
        stages.reverse()
    return [
        Action(phase, stage, number)
        for begin in range(0, microbatches, per_round)
        for stage in stages
        for number in range(begin, min(begin + per_round, microbatches))
    ]


def _ready(action: Action, ends: dict[Action, float], stages: int, message: float) -> float | None:
    """Return when an action's inputs have arrived, or None if it is not known yet."""
    forward = action.phase == FORWARD
    source = action.stage - 1 if forward else action.stage + 1
    if not 0 <= source < stages:
        if forward:
            return 0.0
        return ends.get(Action(FORWARD, action.stage, action.microbatch))
    end = ends.get(Action(action.phase, source, action.microbatch))
    return None if end is None else end + message


def _most_in_flight(order: list[Action]) -> int:
    held = most = 0
    for action in order:
        held += 1 if action.phase == FORWARD else -1
        most = max(most, held)
    return most
