"""The summary of a loader counts what is padded and what is dropped."""

from __future__ import annotations

import pytest

from meshwright.data.plan import DataPlan


def plan(samples: int | None, *, drops: bool = False, fills: bool = True) -> DataPlan:
    return DataPlan(
        samples=samples, num_processes=2, global_batch=8, steps=3, drops_last=drops, fills_last=fills, mode="shards"
    )


@pytest.mark.parametrize(
    ("samples", "drops", "fills", "padding", "dropped"),
    [
        (16, False, True, 0, 0),
        (17, False, True, 7, 0),
        (23, False, True, 1, 0),
        (17, False, False, 0, 0),
        (17, True, True, 0, 1),
        (23, True, False, 0, 7),
        (None, False, True, None, None),
        (None, True, False, None, None),
    ],
)
def test_padding_and_dropped_samples(
    samples: int | None, drops: bool, fills: bool, padding: int | None, dropped: int | None
) -> None:
    each = plan(samples, drops=drops, fills=fills)
    assert (each.per_process_batch, each.padding, each.dropped) == (4, padding, dropped)


def test_the_text_says_what_is_known() -> None:
    lines = [line.split("  ", 1) for line in str(plan(1700)).splitlines()]
    assert {name: value.strip() for name, value in lines} == {
        "samples": "1,700",
        "processes": "2",
        "global batch": "8 = 2 x 4",
        "steps per epoch": "3",
        "padding in the last step": "4",
        "dropped": "0",
        "reading": "shards",
    }
    assert str(plan(None)).count("not known before the end") == 3
