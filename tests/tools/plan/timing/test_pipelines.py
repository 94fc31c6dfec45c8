from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from meshwright.tools.plan.timing.pipelines import Action, Stage, order_of, replay, stage_of, time_pipeline
from meshwright.tools.plan.timing.step import Timing
from meshwright.tools.plan.trace import BACKWARD, FORWARD, UPDATE, Trace


def letters(order: list[Action]) -> str:
    return " ".join(f"{action.phase[0]}{action.microbatch}" for action in order)


def test_gpipe_runs_all_forward_passes_first() -> None:
    assert letters(order_of("gpipe", 0, 2, 1, 3)) == "f0 f1 f2 b0 b1 b2"


def test_1f1b_alternates_after_a_warmup_that_shortens_with_the_rank() -> None:
    assert letters(order_of("1f1b", 0, 3, 1, 4)) == "f0 f1 f2 b0 f3 b1 b2 b3"
    assert letters(order_of("1f1b", 2, 3, 1, 4)) == "f0 b0 f1 b1 f2 b2 f3 b3"


@pytest.mark.parametrize(
    ("ranks", "per_rank", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 3, 4), (2, 2, 6), (4, 2, 16)]
)
def test_interleaved_is_the_order_of_torch(ranks: int, per_rank: int, microbatches: int) -> None:
    def stage(index: int) -> Any:
        return SimpleNamespace(
            stage_index=index, num_stages=ranks * per_rank, group_size=ranks, group_rank=0, has_backward=True,
            group=None, is_first=index == 0, is_last=index == ranks * per_rank - 1, device="cpu",
        )  # fmt: skip

    schedule = ScheduleInterleaved1F1B([stage(ranks * index) for index in range(per_rank)], microbatches)
    for rank in range(ranks):
        theirs = [action for action in schedule.pipeline_order[rank] if action is not None]
        ours = order_of("interleaved", rank, ranks, per_rank, microbatches)
        assert [(int(a.stage_index), a.microbatch_index, a.computation_type.name) for a in theirs] == [
            (a.stage, a.microbatch, {FORWARD: "FORWARD", BACKWARD: "FULL_BACKWARD"}[a.phase]) for a in ours
        ]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_of_equal_stages_is_the_textbook_formula(schedule: str) -> None:
    ranks, microbatches = 4, 8
    found = replay(schedule, [Stage(1.0, 2.0)] * ranks, ranks, microbatches)
    assert found.seconds == pytest.approx((microbatches + ranks - 1) * 3)
    assert found.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


def test_interleaving_divides_the_bubble() -> None:
    plain = replay("1f1b", [Stage(1.0, 2.0)] * 4, 4, 8)
    interleaved = replay("interleaved", [Stage(0.5, 1.0)] * 8, 4, 8)
    assert interleaved.seconds == pytest.approx(8 * 3 + (plain.seconds - 8 * 3) / 2)
    assert sum(interleaved.busy) == pytest.approx(sum(plain.busy))


def test_1f1b_holds_as_many_microbatches_as_stages_follow_and_gpipe_all() -> None:
    stages = [Stage(1.0, 2.0)] * 4
    assert replay("1f1b", stages, 4, 8).in_flight == (4, 3, 2, 1)
    assert replay("gpipe", stages, 4, 8).in_flight == (8, 8, 8, 8)


def test_messages_and_a_slow_stage_lengthen_the_step() -> None:
    base = replay("1f1b", [Stage(1.0, 2.0)] * 2, 2, 4)
    assert replay("1f1b", [Stage(1.0, 2.0)] * 2, 2, 4, message=0.1).seconds > base.seconds
    slow = replay("1f1b", [Stage(1.0, 2.0), Stage(2.0, 4.0)], 2, 4)
    assert slow.seconds == pytest.approx(1 + 4 * 6 + 2)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="gpipe"):
        replay("zigzag", [Stage(1.0, 1.0)], 1, 1)


def test_a_stage_takes_its_part_of_the_rank() -> None:
    timing = Timing(phases={FORWARD: 8.0, BACKWARD: 16.0})
    assert stage_of(timing, microbatches=4, per_rank=2) == Stage(1.0, 2.0)


def test_a_pipeline_is_timed_from_few_of_its_microbatches() -> None:
    phases = {FORWARD: 2.0, BACKWARD: 4.0, UPDATE: 0.5}
    timings = [
        Timing(6.5, phases, calls={"send pp": 4, "recv pp": 4}, communication={"send pp": 0.4}) for _ in range(4)
    ]
    trace = Trace(0, 4, {"pp": 4}, 0, 0, 1, 1, stages=4, schedule="1f1b", microbatches=2, all_microbatches=8)
    found = time_pipeline(timings, trace)
    assert found.seconds == pytest.approx(replay("1f1b", [Stage(1.0, 2.0)] * 4, 4, 8, 0.1).seconds + 0.5)
    assert found.mean.phases[FORWARD] == pytest.approx(8.0)
    trace.schedule, trace.stages = "interleaved", 8
    assert time_pipeline(timings, trace).seconds < found.seconds
