"""What launchers tell each other about the members of a run."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from meshwright.launch.processes.elastic.membership import Membership, ReplacementTotals


@pytest.fixture
def launchers() -> tuple[Membership, Membership]:
    meeting = HashStore()
    host = Membership(meeting, is_host=True, host="127.0.0.1", replicas=4)
    return host, Membership(meeting, is_host=False, host="127.0.0.1", replicas=4)


def test_launchers_see_the_same_members(launchers: tuple[Membership, Membership]) -> None:
    host, other = launchers
    assert host.address == other.address
    other.remove([1, 2], "rank 1 was killed by SIGKILL")
    host.mark_done(0)
    assert host.members() == other.members() == (0, 3)
    assert host.still_training() == other.still_training() == (3,)
    assert host.why_removed(2) == "rank 1 was killed by SIGKILL"


def test_a_request_of_an_earlier_process_is_outdated(launchers: tuple[Membership, Membership]) -> None:
    host, other = launchers
    assert not host.is_outdated(2, 1), "nobody has asked"
    other._store.set("waiting/2", "1")
    assert not host.is_outdated(2, 1)
    assert host.is_outdated(2, 2)


def test_totals_are_those_of_all_machines(launchers: tuple[Membership, Membership]) -> None:
    host, other = launchers
    assert host.totals() == ReplacementTotals()
    host.count_replacements(1)
    other.count_replacements(1)
    other._store.add("lost_ms", 9100)
    assert host.totals() == ReplacementTotals(replacements=2, seconds=9.1)


@pytest.mark.parametrize(
    ("totals", "seconds", "said"),
    [
        (ReplacementTotals(replacements=4, seconds=9.1), 6 * 3600, "4 replacements, 9.1 s lost of 6 h."),
        (ReplacementTotals(replacements=1, seconds=0.52), 100, "1 replacement, 0.5 s lost of 100 s."),
        (
            ReplacementTotals(replacements=2, seconds=30) + ReplacementTotals(replacements=1, seconds=12),
            2700,
            "3 replacements, 42.0 s lost of 45 min.",
        ),
    ],
)
def test_the_total_is_said_in_one_sentence(totals: ReplacementTotals, seconds: float, said: str) -> None:
    assert totals.sentence(seconds) == said
