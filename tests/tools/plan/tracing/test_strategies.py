"""What a trace of few micro-batches stands for."""

from __future__ import annotations

from meshwright.tools.plan.trace import ACTIVATIONS, COMMUNICATION, FORWARD, SETUP, Allocation, Trace
from meshwright.tools.plan.tracing.strategies import buffers_of_others


def allocation(owner: str, phase: str, freed: int | None) -> Allocation:
    return Allocation(size=100, owner=owner, born=1, freed=freed, module="", phase=phase)


def test_micro_batches_that_were_not_traced_have_buffers_and_keep_nothing_else() -> None:
    trace = Trace(rank=0, world_size=2, axes={"pp": 2}, parameters=1, trained_parameters=1, blocks=1, all_blocks=1)
    trace.allocations = [
        allocation(COMMUNICATION, SETUP, None),
        allocation(COMMUNICATION, SETUP, 5),
        allocation(COMMUNICATION, FORWARD, None),
        allocation(ACTIVATIONS, FORWARD, None),  # such as the newest logits
    ]
    assert [(found.owner, found.size) for found in buffers_of_others(trace, 3.0)] == [(COMMUNICATION, 300)]
