from dataclasses import asdict, replace

import pytest

from meshwright.runtime.devices.catalogue import cluster
from meshwright.tools.plan.timing.collectives import collective_seconds
from meshwright.tools.plan.timing.rates import rates
from meshwright.tools.plan.timing.roofline import LATENCY, estimate
from meshwright.tools.plan.timing.step import Timing, time_step
from meshwright.tools.plan.trace import (
    BACKWARD,
    FORWARD,
    MAIN_STREAM,
    UPDATE,
    Collective,
    Operation,
    Trace,
    TracedStep,
)

H100 = cluster("8xH100")
RANKS = tuple(range(8))
N = 8192


def matmul(tick: int, phase: str = FORWARD) -> Operation:
    return Operation(tick, "aten.mm", "", phase, 1, 2 * N**3, 6 * N**2, "bfloat16", (N, N, N))


def gather(tick: int, needed: int | None, size: int = 1 << 28, stream: str = "gather") -> Collective:
    return Collective(tick, "all_gather", "dp_shard", RANKS, size, "", FORWARD, 1, stream, needed)


def reduce(tick: int, needed: int | None, size: int = 1 << 28, stream: str = "reduce") -> Collective:
    return Collective(tick, "reduce_scatter", "dp_shard", RANKS, size, "", BACKWARD, 1, stream, needed)


def timed(*events: Operation | Collective) -> Timing:
    trace = Trace(0, 8, {"dp_shard": 8}, 0, 0, 1, 1)
    trace.steps = [TracedStep(0, 5, 1, 1, 1), TracedStep(5, 10_000, 2, 128, 1)]
    trace.operations = [event for event in events if isinstance(event, Operation)]
    trace.collectives = [event for event in events if isinstance(event, Collective)]
    return time_step(trace, H100)


ONE = estimate(matmul(0), H100.device).seconds


def test_operations_run_one_after_the_other() -> None:
    timing = timed(matmul(10), matmul(11), matmul(12, BACKWARD))
    host = H100.device.efficiency.host_us * 1e-6
    assert timing.seconds == pytest.approx(host + 3 * ONE)
    assert timing.phases[BACKWARD] == pytest.approx(ONE)
    assert timing.kinds == pytest.approx({"matmul": 3 * ONE})
    assert sum(timing.bounds.values()) == pytest.approx(timing.seconds)


def test_other_steps_do_not_count() -> None:
    assert timed(matmul(2), matmul(10)).seconds == timed(matmul(10)).seconds


def test_tiny_operations_take_the_time_of_the_host() -> None:
    tiny = [Operation(10 + i, "aten.add", "", FORWARD, 1, 0, 512, "bfloat16") for i in range(100)]
    timing = timed(*tiny)
    assert timing.seconds >= 100 * H100.device.efficiency.host_us * 1e-6
    assert timing.bounds[LATENCY] == pytest.approx(timing.seconds)


def test_a_collective_on_the_main_stream_is_exposed() -> None:
    own = gather(11, None, stream=MAIN_STREAM)
    timing = timed(matmul(10), own, matmul(12))
    assert timing.exposed["all_gather dp_shard"] == pytest.approx(collective_seconds(own, H100))
    assert timing.communication == pytest.approx(timing.exposed)


def test_a_collective_that_is_waited_for_later_runs_beside_the_computation() -> None:
    def exposed(needed: int) -> float:
        return timed(matmul(10), gather(11, needed, stream=MAIN_STREAM), matmul(12), matmul(13)).exposed[
            "all_gather dp_shard"
        ]

    assert exposed(12) == pytest.approx(collective_seconds(gather(0, None), H100))
    assert exposed(13) == 0


def test_a_gather_hides_behind_the_layer_before_its_use() -> None:
    first, second = gather(10, 11), gather(12, 13)
    timing = timed(first, matmul(11), second, matmul(13))
    duration = collective_seconds(second, H100)
    assert duration < ONE
    assert timing.communication["all_gather dp_shard"] == pytest.approx(2 * duration)
    assert timing.exposed["all_gather dp_shard"] == pytest.approx(duration, rel=0.02)


def test_only_one_layer_ahead_is_gathered() -> None:
    long = 1 << 33
    layers = [event for i in range(10, 40, 2) for event in (gather(i, i + 1, long), matmul(i + 1))]
    timing = timed(*layers)
    assert timing.seconds >= 15 * collective_seconds(gather(0, 1, long), H100)


def test_gradients_are_reduced_after_they_are_computed_and_beside_what_follows() -> None:
    last = timed(matmul(10, BACKWARD), reduce(11, None))
    hidden = timed(matmul(10, BACKWARD), reduce(11, 13), matmul(12, BACKWARD), matmul(13, UPDATE))
    duration = collective_seconds(reduce(0, None), H100)
    assert last.exposed["reduce_scatter dp_shard"] == pytest.approx(duration)
    assert hidden.exposed["reduce_scatter dp_shard"] == 0
    assert hidden.sent == {"reduce_scatter dp_shard": 1 << 28}
    assert hidden.calls == {"reduce_scatter dp_shard": 1}


def test_the_optimizer_waits_for_gradients() -> None:
    timing = timed(matmul(10, BACKWARD), reduce(11, None), matmul(12, UPDATE))
    assert timing.exposed["reduce_scatter dp_shard"] == pytest.approx(collective_seconds(reduce(0, None), H100))
    assert timing.phases[BACKWARD] < timing.seconds - timing.phases[UPDATE] * 0.99
    assert timing.phases[UPDATE] > ONE


def test_computation_beside_a_collective_is_slower() -> None:
    alone = timed(matmul(10, BACKWARD), matmul(12, BACKWARD))
    beside = timed(matmul(10, BACKWARD), reduce(11, 13), matmul(12, BACKWARD))
    assert alone.seconds < beside.seconds < alone.seconds * 1.2


def test_collectives_of_one_group_do_not_run_at_once() -> None:
    timing = timed(gather(10, None), reduce(11, None))
    assert timing.seconds >= 2 * collective_seconds(gather(0, None), H100)


def test_messages_between_stages_are_left_to_the_schedule() -> None:
    send = Collective(11, "send", "pp", (0, 1), 1 << 30, "", FORWARD, 1)
    timing = timed(matmul(10), send)
    assert timing.seconds == pytest.approx(timed(matmul(10)).seconds, rel=0.02)
    assert timing.communication["send pp"] > 0


def test_recomputed_and_frozen_work_is_not_counted_as_the_models() -> None:
    forward = 2 * N**3
    again = replace(matmul(11, BACKWARD), recomputed=True)
    assert timed(matmul(10), again, matmul(12, BACKWARD), matmul(13, BACKWARD)).model_flops == 3 * forward
    assert timed(matmul(10), again, matmul(12, BACKWARD)).model_flops == 2 * forward
    assert timed(matmul(10), *[matmul(11 + i, BACKWARD) for i in range(3)]).model_flops == 3 * forward
    assert timed(matmul(10), *[matmul(11 + i, BACKWARD) for i in range(2)]).model_flops == 3 * forward
    assert timed(matmul(10), matmul(11, BACKWARD)).model_flops == 2 * forward


def test_rates_count_every_loader_once() -> None:
    trace = Trace(0, 8, {"dp_shard": 2, "tp": 4}, 0, 0, 1, 1)
    trace.steps = [TracedStep(0, 100, 2, 128, 1)]
    trace.operations = [matmul(10), matmul(11, BACKWARD), matmul(12, BACKWARD)]
    timing = time_step(trace, H100)
    found = rates(timing, trace, H100, seconds=2.0)
    assert (found.samples_per_second, found.tokens_per_second, found.tokens_per_second_and_device) == (2, 128, 16)
    assert found.mfu == pytest.approx(6 * N**3 / (2.0 * 989.4e12))
    assert found.low < found.seconds < found.high


def test_a_timing_is_plain_data() -> None:
    timing = timed(matmul(10), gather(11, 12), matmul(12))
    assert Timing(**asdict(timing)) == timing


def test_an_empty_step_takes_no_time() -> None:
    timing = timed()
    assert timing.seconds == 0
    assert rates(timing, Trace(0, 1, {}, 0, 0, 1, 1, steps=[TracedStep(0, 1, 1, 1, 1)]), H100).mfu == 0
