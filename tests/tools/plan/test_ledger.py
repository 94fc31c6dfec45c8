"""The ledger of communication."""

from __future__ import annotations

import pytest

from meshwright.tools.plan.ledger import extrapolated_ledger, ledger_of, sent_by, timed
from meshwright.tools.plan.trace import Collective
from tests.tools.plan.made import MIB, model


def test_it_counts_the_last_step_only() -> None:
    (row,) = ledger_of(model(3))
    assert (row.collective, row.axis, row.group, row.calls) == ("all_reduce", "dp_replicate", 4, 3)
    assert (row.size, row.sent) == (24 * MIB, 24 * MIB * 2 * 3 / 4)
    assert row.seconds is None


@pytest.mark.parametrize(
    ("name", "ranks", "sent"),
    [
        ("all_gather", 4, 75),
        ("reduce_scatter", 4, 75),
        ("all_to_all", 4, 75),
        ("all_reduce", 4, 150),
        ("send", 2, 100),
        ("recv", 2, 0),
        ("all_reduce", 1, 0),
    ],
)
def test_bytes_that_one_rank_sends(name: str, ranks: int, sent: float) -> None:
    assert sent_by(Collective(0, name, "tp", tuple(range(ranks)), 100, "", "forward", 0)) == sent


def test_it_grows_with_the_blocks() -> None:
    few, more = ledger_of(model(2, sharded=True)), ledger_of(model(3, sharded=True))
    assert extrapolated_ledger(few, more, 30) == ledger_of(model(32, sharded=True))


def test_seconds_that_computation_does_not_wait_for_are_hidden() -> None:
    (row,) = timed(ledger_of(model(3)), {"all_reduce dp_replicate": 0.5}, {"all_reduce dp_replicate": 0.2})
    assert (row.seconds, row.hidden) == (0.5, pytest.approx(0.3))
