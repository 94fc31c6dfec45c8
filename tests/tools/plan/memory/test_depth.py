"""The memory of deep models from shallow ones."""

from __future__ import annotations

import pytest

from meshwright.tools.plan.memory.depth import extrapolated
from meshwright.tools.plan.memory.peak import memory_of
from meshwright.tools.plan.trace import BACKWARD, FORWARD, Trace
from tests.tools.plan.made import MIB, model


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("blocks", [2, 3, 4, 10, 40])
def test_it_equals_the_trace_of_the_deep_model(blocks: int, sharded: bool) -> None:
    deep = memory_of(model(blocks, sharded=sharded))
    line = extrapolated(*(memory_of(model(few, sharded=sharded)) for few in (2, 3)), blocks)
    assert line.peak.bytes == deep.peak.bytes
    assert line.most == deep.most
    assert line.setup == deep.setup
    assert line.peak.moment.phase == deep.peak.moment.phase
    assert line.reserved >= line.allocated >= line.total


def test_what_the_allocator_holds_stays_the_same_share() -> None:
    few, more, deep = (memory_of(enlarged(model(blocks), 16)) for blocks in (3, 4, 20))
    line = extrapolated(few, more, 20)
    assert line.reserved == pytest.approx(deep.reserved, rel=0.1)
    assert line.expandable == pytest.approx(deep.expandable, rel=0.1)


def enlarged(trace: Trace, factor: int) -> Trace:
    for allocation in trace.allocations:
        allocation.size *= factor
    return trace


def test_the_peak_moves_to_another_phase_with_the_depth() -> None:
    """A shallow model has its peak where a block is gathered, a deep one where all gradients exist."""
    few, more = (memory_of(model(blocks, sharded=True)) for blocks in (2, 3))
    assert {few.peak.moment.phase, more.peak.moment.phase} == {FORWARD}
    deep = extrapolated(few, more, 10)
    assert deep.peak.moment.phase == BACKWARD
    assert deep.total == 324 * MIB


def test_blocks_of_the_same_kind_of_module_are_counted() -> None:
    deep = extrapolated(memory_of(model(2)), memory_of(model(4)), 32)
    weights = next(share for share in deep.peak.largest if share.owner == "weights")
    assert (weights.bytes / MIB, weights.count) == (8 * 32, 32)


def test_the_timeline_reaches_the_new_maximum_of_each_owner() -> None:
    deep = extrapolated(memory_of(model(2)), memory_of(model(4)), 32)
    assert {owner: max(sizes) for owner, sizes in deep.timeline.bytes.items()} == deep.most
    assert deep.shape_of == 4


def test_the_order_is_checked() -> None:
    memory = memory_of(model(2))
    with pytest.raises(ValueError, match="more blocks"):
        extrapolated(memory, memory, 32)
