"""Where two records differ, and what is known of it. The runs are in `tests/commands/test_compare.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.tools.compare.causes import KNOWN
from meshwright.tools.compare.records import ComparedRun, ComparedStep, End, RankRecord, Start
from meshwright.tools.compare.verdict import ComparisonVerdict, first_difference, judge

STEPS = [ComparedStep([f"{1 / n}"], f"{2 / n}", ["0.1"], f"{n:016x}", [(1, 4, n)], 0.01) for n in range(1, 6)]


def run(steps: list[ComparedStep] = STEPS, processes: int = 1) -> ComparedRun:
    end = End([5], 1 << 20, 0)
    return ComparedRun(
        [RankRecord(Start(rank, processes, "2.13.0", "1.15.0"), steps, end) for rank in range(processes)]
    )


def with_step(number: int, **values: object) -> ComparedRun:
    return run([*STEPS[: number - 1], replace(STEPS[number - 1], **values), *STEPS[number:]])  # type: ignore[arg-type]


def verdict(theirs: ComparedRun, *ours: ComparedRun) -> ComparisonVerdict:
    return judge([theirs], ours, on_cpu=True, other_torch=False)


@pytest.mark.parametrize(
    ("what", "values"),
    [
        ("loss", {"losses": ["0.33333333333333337"]}),
        ("backward passes", {"losses": ["0.1", "0.1"]}),
        ("gradient norm", {"gradient_norm": "nan"}),
        ("learning rate", {"learning_rates": ["0.10000000000000002"]}),
        ("parameters", {"parameters": "f" * 16}),
        ("samples", {"batches": [(1, 4, 77)]}),
    ],
)
def test_the_first_step_that_differs_is_named_with_what_differs(what: str, values: dict[str, object]) -> None:
    found = first_difference(run(), with_step(3, **values))
    assert found is not None
    assert (found.step, found.what) == (3, what)


def test_a_loss_that_is_no_number_on_both_sides_is_equal() -> None:
    assert first_difference(with_step(2, losses=["nan"]), with_step(2, losses=["nan"])) is None


def test_a_batch_that_one_side_has_read_ahead_is_no_difference() -> None:
    ahead = [replace(step, batches=[(1, 4, n + 1)]) for n, step in enumerate(STEPS, start=1)]
    ahead[0] = replace(ahead[0], batches=[(1, 4, 1), (1, 4, 2)])
    assert first_difference(run(ahead), run()) is None


def test_fewer_steps_or_processes_are_a_difference() -> None:
    fewer = first_difference(run(), run(STEPS[:3]))
    assert fewer is not None
    assert (fewer.step, fewer.what) == (4, "steps")
    alone = verdict(run(), run(processes=2)).first
    assert alone is not None
    assert (alone.what, alone.theirs, alone.ours) == ("processes", "1", "2")


def test_a_script_that_does_not_repeat_itself_gives_no_answer() -> None:
    other = with_step(2, losses=["7.0"])
    unsteady = judge([run(), other], [run(), run()], on_cpu=True, other_torch=False)
    assert not unsteady.is_known
    differs_before = judge([run(), with_step(4, losses=["7.0"])], [other, other], on_cpu=True, other_torch=False)
    assert differs_before.is_known


def test_a_loss_scaler_on_a_cpu_is_a_known_cause() -> None:
    scaled = verdict(run(), with_step(1, losses=["65536.0"]))
    assert [cause.row for cause in scaled.causes] == ['`mixed_precision="fp16"` on a CPU']


def test_every_cause_points_to_a_row_that_is_there() -> None:
    lines = (Path(__file__).parents[3] / "docs" / "differences.md").read_text(encoding="utf-8").splitlines()
    rows = {line.split(" | ")[0].removeprefix("| ") for line in lines}
    assert not [cause.row for cause in KNOWN if cause.row and cause.row not in rows]
