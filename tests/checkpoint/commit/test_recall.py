"""Which copy is complete over all machines, and who gets what from whom."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.checkpoint.commit.recall import Holding, Inventory
from meshwright.checkpoint.storage.memory import GENERATORS, STATE, CopyRecord


def record(kind: str, owner: int, step: int, num_processes: int = 4) -> CopyRecord:
    return CopyRecord(kind=kind, owner=owner, step=step, num_processes=num_processes, size=1, checksum="x", slot="a")


def inventory(kept: Mapping[int, list[CopyRecord]], owners: tuple[int, ...] = (0, 1, 2, 3)) -> Inventory:
    """Four ranks on two machines, 0 and 2; `kept` by machine."""
    return Inventory(
        [Holding(machine=rank // 2 * 2, owner=owner, records=kept.get(rank, [])) for rank, owner in enumerate(owners)]
    )


def test_a_step_is_complete_if_every_state_is_on_some_machine() -> None:
    shards = {0: [record(STATE, owner, 8) for owner in range(4)], 2: [record(STATE, owner, 12) for owner in (2, 3)]}
    assert inventory(shards).complete_steps() == [8]
    assert inventory({0: shards[0][:3]}).complete_steps() == []
    shards[0] += [record(STATE, owner, 12) for owner in (0, 1)]
    assert inventory(shards).complete_steps() == [12, 8]


def test_one_state_of_replicas_is_enough() -> None:
    assert inventory({2: [record(STATE, 0, 4)]}, owners=(0, 0, 0, 0)).complete_steps() == [4]
    assert inventory({2: [record(STATE, 0, 4)]}, owners=(0, 1, 0, 1)).complete_steps() == []


def test_a_machine_gets_what_it_lacks_from_one_that_has_it() -> None:
    everything = [record(STATE, owner, 8) for owner in range(4)] + [record(GENERATORS, rank, 8) for rank in range(4)]
    found = inventory({2: everything})
    assert [(one.record.key, one.source, one.target) for one in found.transfers(8)] == [
        ((STATE, 0), 2, 0),
        ((STATE, 1), 2, 0),
        ((GENERATORS, 0), 2, 0),
        ((GENERATORS, 1), 2, 0),
    ]
    assert inventory({0: everything, 2: everything}).transfers(8) == []


def test_copies_of_another_number_of_processes_do_not_count() -> None:
    found = inventory({0: [record(STATE, owner, 8, num_processes=8) for owner in range(4)]})
    assert found.complete_steps() == []
    assert found.other_worlds == {8}
