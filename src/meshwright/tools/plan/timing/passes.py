"""Extend a trace with few passes of accumulation to a step with many."""

from __future__ import annotations

from dataclasses import replace

from ..trace import BACKWARD, FORWARD, Trace


def with_another_pass(trace: Trace) -> Trace:
    """Return a trace whose last step does its first pass, which reduces no gradients, once more."""
    step = trace.steps[-1]
    split = _second_pass(trace)
    length = split - step.began
    last = len(trace.steps) - 1
    operations = [event for event in trace.operations if event.step == last]
    collectives = [event for event in trace.collectives if event.step == last]
    again = [replace(event, tick=event.tick - length) for event in operations if event.tick < split]
    communicated = [
        replace(event, tick=event.tick - length, needed=None if event.needed is None else event.needed - length)
        for event in collectives
        if event.tick < split
    ]
    return replace(
        trace,
        operations=again + operations,
        collectives=communicated + collectives,
        steps=[*trace.steps[:-1], replace(step, began=step.began - length, passes=step.passes + 1)],
    )


def _second_pass(trace: Trace) -> int:
    """Return the tick at which the second forward pass of the last step begins; its end if there is none."""
    last, backward = len(trace.steps) - 1, False
    for operation in trace.operations:
        if operation.step == last:
            backward = backward or operation.phase == BACKWARD
            if backward and operation.phase == FORWARD:
                return operation.tick
    return trace.steps[-1].ended
