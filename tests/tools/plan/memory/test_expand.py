"""The memory of all blocks from a trace with three of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.tools.plan.memory.expand import _repetition, expanded
from meshwright.tools.plan.memory.peak import memory_of
from meshwright.tools.plan.memory.visits import CannotExpandError
from meshwright.tools.plan.trace import BACKWARD, FORWARD, TEMPORARIES, UPDATE, Allocation, Trace
from tests.tools.plan.made import MIB, Maker, model


def shapes(trace: Trace) -> list[tuple[int, str, str, str]]:
    return sorted((a.size, a.owner, a.module, a.phase) for a in trace.allocations)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("traced", [3, 4, 5])
@pytest.mark.parametrize("blocks", [5, 12, 41])
def test_it_equals_the_trace_of_the_deep_model(blocks: int, traced: int, sharded: bool) -> None:
    deep, short = model(blocks, sharded=sharded), expanded(model(traced, sharded=sharded), blocks - traced)
    assert shapes(short) == shapes(deep)
    assert [operation.module for operation in short.operations] == [operation.module for operation in deep.operations]
    real, made = memory_of(deep), memory_of(short)
    assert made.peak == real.peak
    assert made.most == real.most
    assert (made.reserved, made.expandable, made.allocated) == (real.reserved, real.expandable, real.allocated)
    assert made.blocks == blocks


def passing_on(blocks: int) -> Trace:
    """Each block keeps what the block before it made, and frees a buffer of it."""
    made = Maker(blocks=blocks)
    began = made.tick + 1
    kept: list[Allocation] = []
    buffer = None
    for block in range(blocks):
        made.at(FORWARD, f"blocks.{block}").compute()
        kept.append(made.make(3 * MIB + block % 2, "activations"))
        previous, buffer = buffer, made.make(50 * MIB, "gathered", stream="gathers")
        if previous is not None:
            made.free(previous)
    mask = made.make(7 * MIB, "activations")
    for block in reversed(range(blocks)):
        made.at(BACKWARD, f"blocks.{block}").compute()
        if block:
            made.free(kept[block - 1])
        if block == blocks - 1 and buffer is not None:
            made.free(buffer, kept[block])
    made.free(mask)
    made.trace.steps.append(type(model(2).steps[0])(began, made.tick + 1, 1, 1, 1))
    return made.trace


def updated_one_by_one(blocks: int) -> Trace:
    """An optimizer goes from parameter to parameter, and frees its temporaries before the next one."""
    made = Maker(blocks=blocks)
    began = made.tick + 1
    for block in range(blocks):
        made.at(FORWARD, f"blocks.{block}").compute()
    for block in reversed(range(blocks)):
        made.at(BACKWARD, f"blocks.{block}").compute()
    for _ in range(blocks):
        made.at(UPDATE, "").compute()
        temporaries = [made.make(4 * MIB, TEMPORARIES), made.make(4 * MIB, TEMPORARIES)]
        for each in temporaries:
            made.free(each)
    made.trace.steps.append(type(model(2).steps[0])(began, made.tick + 1, 1, 1, 1))
    return made.trace


@pytest.mark.parametrize("blocks", [6, 9])
def test_temporaries_of_one_parameter_after_the_other_are_there_once(blocks: int) -> None:
    short = memory_of(expanded(updated_one_by_one(4), blocks - 4))
    assert short.peak.bytes == memory_of(updated_one_by_one(blocks)).peak.bytes
    assert sum(short.peak.bytes.values()) == 8 * MIB


@pytest.mark.parametrize("blocks", [6, 9])
def test_what_ends_in_the_next_block_ends_in_the_next_block(blocks: int) -> None:
    deep, short = passing_on(blocks), expanded(passing_on(4), blocks - 4)
    real, made = memory_of(deep), memory_of(short)
    assert made.total == pytest.approx(real.total, abs=blocks)
    assert made.most["gathered"] == real.most["gathered"] == 100 * MIB
    assert made.reserved == real.reserved


def test_blocks_can_repeat_two_by_two() -> None:
    def alternating(blocks: int) -> Trace:
        trace = model(blocks)
        for allocation in trace.allocations:
            if allocation.module.startswith("layers") and int(allocation.module.rpartition(".")[2]) % 2:
                allocation.size *= 3
        return trace

    assert memory_of(expanded(alternating(6), 6, period=2)).peak == memory_of(alternating(12)).peak


def test_the_buckets_of_ddp_grow_with_the_gradients() -> None:
    def replicated(blocks: int) -> Trace:
        trace = model(blocks)
        sizes = [1, 25, 25, 8 * blocks - 51]
        for size in sizes:
            trace.allocations.insert(blocks, Allocation(size * MIB, "communication", blocks, None, "", "setup"))
        return trace

    total = memory_of(expanded(replicated(8), 12)).most["communication"]
    assert total == memory_of(replicated(20)).most["communication"]


def test_a_pass_that_skips_blocks_is_refused() -> None:
    trace = model(4)
    trace.operations = [each for each in trace.operations if (each.phase, each.module) != (BACKWARD, "layers.2")]
    with pytest.raises(CannotExpandError, match="backward pass visits 3 of 4 blocks"):
        expanded(trace, 2)


def test_a_model_without_blocks_is_refused() -> None:
    trace = model(3)
    for operation in trace.operations:
        operation.module = "encoder"
    with pytest.raises(CannotExpandError, match="no operation"):
        expanded(trace, 2)


def test_a_model_with_another_list_of_as_many_blocks_is_refused() -> None:
    trace = model(3)
    last = max(operation.tick for operation in trace.operations)
    trace.operations += [
        replace(trace.operations[0], tick=last + block, module=f"decoder.{block}") for block in range(4)
    ]
    with pytest.raises(CannotExpandError, match="several lists"):
        expanded(trace, 2)


def test_the_longest_repetition_is_found() -> None:
    assert _repetition("xabcabcabcyz", 3) == (1, 3)
    assert _repetition("abab", 3) is None
    assert _repetition("aaaaaa", 3) == (0, 2)


def test_a_loss_in_parts_is_no_list_over_all_blocks() -> None:
    def with_parts(blocks: int) -> Trace:
        trace = model(blocks)
        last = max(o.tick for o in trace.operations if o.phase == FORWARD)
        parts = [Allocation(9 * MIB, "temporaries", last + 1, last + 2, "", FORWARD) for _ in range(8)]
        trace.allocations = sorted([*trace.allocations, *parts], key=lambda each: each.born)
        return trace

    assert memory_of(expanded(with_parts(4), 20)).most["temporaries"] == memory_of(with_parts(24)).most["temporaries"]
