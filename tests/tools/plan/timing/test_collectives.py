import pytest

from meshwright.runtime.devices.catalogue import cluster
from meshwright.tools.plan.timing.collectives import collective_seconds
from meshwright.tools.plan.trace import FORWARD, Collective

H100 = cluster("64xH100")


def seconds(name: str, ranks: tuple[int, ...], size: int = 1 << 30) -> float:
    return collective_seconds(Collective(0, name, "dp", ranks, size, "", FORWARD, 0), H100)


def test_a_group_of_one_takes_no_time() -> None:
    assert seconds("all_reduce", (3,)) == 0


def test_a_gather_inside_a_node_takes_its_bytes_over_the_link() -> None:
    expected = (1 << 30) * 7 / 8 / (450e9 * H100.device.efficiency.link)
    assert seconds("all_gather", tuple(range(8))) == pytest.approx(expected, rel=0.05)


def test_an_all_reduce_moves_twice_the_bytes_of_a_gather() -> None:
    for ranks in (tuple(range(8)), tuple(range(64))):
        assert seconds("all_reduce", ranks) == pytest.approx(2 * seconds("all_gather", ranks), rel=0.1)
        assert seconds("reduce_scatter", ranks) == pytest.approx(seconds("all_gather", ranks), rel=0.05)


def test_across_nodes_the_network_is_the_limit() -> None:
    assert seconds("all_gather", (0, 8)) > 5 * seconds("all_gather", (0, 1))
    assert seconds("send", (0, 8)) > 5 * seconds("send", (0, 1))
    assert seconds("broadcast", (0, 8)) > 5 * seconds("broadcast", (0, 1))
    assert seconds("all_to_all", tuple(range(16))) > seconds("all_to_all", tuple(range(8)))


def test_members_on_one_node_share_the_work_of_the_network() -> None:
    assert seconds("all_gather", tuple(range(16))) < 0.3 * seconds("all_gather", (0, 8))


def test_a_small_collective_takes_the_latency_of_its_steps() -> None:
    assert seconds("all_gather", tuple(range(64)), 512) > seconds("all_gather", tuple(range(8)), 512) > 1e-6
    assert seconds("barrier", tuple(range(8)), 0) > 0
