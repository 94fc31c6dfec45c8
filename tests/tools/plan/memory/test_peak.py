"""The memory of a rank, on traces whose sums are known."""

from __future__ import annotations

import pytest

from meshwright.tools.plan.memory.peak import Memory, Moment, memory_of
from meshwright.tools.plan.trace import (
    ACTIVATIONS,
    BACKWARD,
    COMMUNICATION,
    FORWARD,
    GRADIENTS,
    OPTIMIZER,
    SETUP,
    TEMPORARIES,
    UPDATE,
    WEIGHTS,
    Trace,
    TracedStep,
)
from tests.tools.plan.made import MIB, Maker, model


def test_the_peak_of_a_step_by_owner() -> None:
    memory = memory_of(model(2))
    owners = {owner: size / MIB for owner, size in memory.peak.bytes.items() if size}
    # The last bucket of the second backward pass: all gradients, no activations.
    assert owners == {WEIGHTS: 16, OPTIMIZER: 32, GRADIENTS: 16, COMMUNICATION: 8}
    assert memory.total == 72 * MIB
    assert memory.peak.moment == Moment(1, BACKWARD, "layers.0", "")


def test_the_operation_at_the_peak_is_the_one_that_runs_then() -> None:
    made = Maker()
    made.at(FORWARD, "a")
    made.trace.steps = [TracedStep(1, 9, 1, 0, 1)]
    made.make(100, ACTIVATIONS)
    made.tick -= 1
    made.compute("aten.cat")
    assert memory_of(made.trace).peak.moment.operation == "aten.cat"


def test_what_lives_until_the_backward_pass_is_an_activation_whatever_the_tracer_guessed() -> None:
    memory = memory_of(model(2))
    last_block = memory.places[f"{FORWARD} last layers.*"]
    assert last_block.bytes[ACTIVATIONS] == 2 * 4 * MIB
    assert last_block.bytes[TEMPORARIES] == 2 * MIB


def test_micro_batches_have_passes_of_their_own() -> None:
    made = Maker()
    made.at(FORWARD, "a")
    made.trace.steps = [TracedStep(1, 99, 2, 0, 2)]
    for _ in range(2):
        kept = made.at(FORWARD, "a").make(100, TEMPORARIES)
        short = made.make(10, ACTIVATIONS)
        made.free(short)
        made.compute()
        made.at(BACKWARD, "a").compute()
        made.free(kept)
    memory = memory_of(made.trace)
    assert memory.most[ACTIVATIONS] == 100
    assert memory.most[TEMPORARIES] == 10


def test_what_a_backward_pass_leaves_to_the_next_pass_are_gradients() -> None:
    made = Maker()
    made.trace.steps = [TracedStep(0, 99, 2, 0, 2)]
    made.at(FORWARD, "a").compute()
    made.at(BACKWARD, "a").compute()
    unreduced, short = made.make(100, TEMPORARIES), made.make(10, TEMPORARIES)
    made.free(short)
    made.at(FORWARD, "a").compute()
    made.free(unreduced)
    memory = memory_of(made.trace)
    assert (memory.most[GRADIENTS], memory.most[TEMPORARIES]) == (100, 10)


def test_the_setup_counts_apart() -> None:
    made = Maker()
    copy = made.at(SETUP).make(500, TEMPORARIES)
    made.make(100, WEIGHTS)
    made.free(copy)
    made.trace.steps = [TracedStep(made.tick + 1, made.tick + 9, 1, 0, 1)]
    made.at(FORWARD, "a").make(50, ACTIVATIONS)
    memory = memory_of(made.trace)
    assert (memory.setup, memory.total) == (600, 150)
    assert memory.peak.moment.step == 0


def test_a_buffer_inside_of_one_operation_counts() -> None:
    made = Maker()
    made.trace.steps = [TracedStep(0, 9, 1, 0, 1)]
    made.at(FORWARD, "a").make(100, ACTIVATIONS)
    inside = made.make(40, TEMPORARIES)
    inside.freed = inside.born
    assert memory_of(made.trace).total == 140


def test_what_ends_makes_room_for_what_begins() -> None:
    made = Maker()
    made.trace.steps = [TracedStep(0, 9, 1, 0, 1)]
    first = made.at(FORWARD, "a").make(100, ACTIVATIONS)
    second = made.make(100, ACTIVATIONS)
    first.freed = second.born
    assert memory_of(made.trace).total == 100


def test_the_largest_allocations_are_grouped_by_kind_of_module() -> None:
    largest = memory_of(model(3)).peak.largest
    assert [(share.module, share.owner, share.bytes / MIB, share.count) for share in largest] == [
        ("", OPTIMIZER, 48, 3),
        ("layers.*", WEIGHTS, 24, 3),
        ("layers.*", GRADIENTS, 24, 3),
        ("layers.*", COMMUNICATION, 8, 1),
    ]


def test_the_allocator_holds_at_least_what_is_allocated() -> None:
    memory = memory_of(model(4))
    for held in (memory.reserved, memory.expandable):
        assert memory.total <= memory.allocated <= held
    assert 0 <= memory.fragmentation < 1


def test_a_buffer_that_another_stream_uses_is_not_reused_before_that_is_done() -> None:
    def reserved(needed: int | None) -> float:
        made = Maker()
        made.trace.steps = [TracedStep(0, 99, 1, 0, 1)]
        bucket = made.at(BACKWARD, "a").make(32 * MIB, COMMUNICATION)
        made.communicate("all_reduce", "dp_replicate", 2, 32 * MIB, stream="collectives").needed = needed
        made.free(bucket)
        made.make(32 * MIB, GRADIENTS)
        return memory_of(made.trace).reserved

    assert reserved(needed=50) == 64 * MIB
    assert reserved(needed=None) == 32 * MIB


def test_the_timeline_is_that_of_the_last_step() -> None:
    trace = model(6)
    timeline = memory_of(trace).timeline
    sums = [sum(sizes) for sizes in zip(*timeline.bytes.values(), strict=True)]
    assert max(sums) == memory_of(trace).total
    assert timeline.at == sorted(timeline.at)
    assert {len(values) for values in (timeline.at, timeline.reserved, sums)} == {len(timeline.at)}
    assert all(held >= size for held, size in zip(timeline.reserved, sums, strict=True))
    assert min(timeline.bytes[OPTIMIZER]) == 6 * 16 * MIB  # the state exists from the first step on
    assert [phase for _, phase in timeline.passes] == [FORWARD, BACKWARD, UPDATE]
    assert timeline.passes[0][0] == 0


def test_a_trace_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no allocations"):
        memory_of(Maker().trace)


def test_many_allocations_take_seconds() -> None:
    import time

    trace: Trace = model(400, step_count=8)
    began = time.process_time()
    memory: Memory = memory_of(trace)
    assert memory.total == (32 * 400 + 8) * MIB
    assert time.process_time() - began < 20 * len(trace.allocations) / 300_000 + 1
