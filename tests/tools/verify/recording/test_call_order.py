"""The ranks' order of calls: the first place where they part."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.tools.verify.recording.call_order import CallOrder, disagreement


def write(folder: Path, *orders: str) -> None:
    for rank, order in enumerate(orders):
        calls = CallOrder(folder, rank, len(orders))
        for letter in order:
            {"b": calls.begin_pass, "s": calls.step, "e": calls.end}[letter]()


@pytest.mark.parametrize(
    ("orders", "failed", "found"),
    [
        (("bsbse", "bsbse"), False, None),
        (("bsbse", "bsb"), False, None),
        (("bsbse", "bsbb"), True, (1, 2, "rank 1 begins a backward pass where rank 0 steps its optimizer")),
        (("bsbb", "bsbse"), True, (1, 2, "rank 0 begins a backward pass where rank 1 steps its optimizer")),
        (("bsbse", "bse"), False, (1, 2, "rank 1 ends where rank 0 begins a backward pass")),
        (("bsbse", "bsb"), True, (1, 2, "rank 1 waits for the others where rank 0 steps its optimizer")),
        (("bsb", "bs"), True, None),
        (("bse", "bse", "be"), False, (2, 1, "rank 2 ends where rank 0 steps its optimizer")),
    ],
)
def test_the_first_difference_is_found(
    orders: tuple[str, ...], failed: bool, found: tuple[int, int, str] | None, tmp_path: Path
) -> None:
    write(tmp_path, *orders)
    assert disagreement(tmp_path, failed=failed) == found


def test_a_rank_does_not_wait_for_others_that_do_something_else(tmp_path: Path) -> None:
    write(tmp_path, "bse", "bb")
    CallOrder(tmp_path, 0, 2).wait_for_others()
