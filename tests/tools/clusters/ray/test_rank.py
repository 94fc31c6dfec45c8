"""What is known of a rank on Ray without a cluster: its variables, how it ended, and the files that it left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright import ray_launcher
from meshwright.errors import UnsupportedSettingError
from meshwright.launch.processes.verdict import judge, panel
from meshwright.tools.clusters.ray.placement import RankPlacement
from meshwright.tools.clusters.ray.rank import RankProcess, read_ending
from meshwright.tools.clusters.ray.run import RankActors, Work, _ended_by_launcher, _lost_process

REPORTED = """The actor died unexpectedly before finishing this task.
The actor is dead because its worker process has died. Connection reset by peer. Some common causes include: ..."""


def place(rank: int, node: int, local_rank: int, local_world_size: int) -> RankPlacement:
    return RankPlacement(
        rank=rank,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=node,
        node_id=f"node{node}",
        address=f"10.0.0.{node}",
        bundle=rank,
    )


def variables_of(rank: int, places: list[RankPlacement], devices: list[tuple[str, ...]]) -> dict[str, str]:
    work = Work(method="run_function", arguments=(), variables={"A": "b"}, max_restarts=2)
    ranks: Any = object.__new__(RankActors)
    ranks._work, ranks._places, ranks._attempt = work, places, 1
    ranks._several_nodes = len({each.node_id for each in places}) > 1
    ranks._ranks = {
        each.rank: RankProcess(pid=1, free_port=7000 + each.rank, devices=given, error_file="")
        for each, given in zip(places, devices, strict=True)
    }
    return dict(ranks._variables(places[rank]))


def test_ranks_get_the_variables_of_any_launcher() -> None:
    three = [place(0, 0, 0, 2), place(1, 0, 1, 2), place(2, 1, 0, 1)]
    found = variables_of(1, three, [("5",), ("2",), ("0",)])
    assert found == {
        "A": "b",
        "RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.0",
        "MASTER_PORT": "7000",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "2",
        "CUDA_VISIBLE_DEVICES": "5,2",
    }


def test_on_one_node_the_ranks_meet_on_loopback_and_a_shared_device_is_left_as_it_is() -> None:
    found = variables_of(0, [place(0, 0, 0, 2), place(1, 0, 1, 2)], [("0",), ("0",)])
    assert found["MASTER_ADDR"] == "127.0.0.1"
    assert "CUDA_VISIBLE_DEVICES" not in found


def test_a_process_that_is_gone_is_the_culprit_whatever_ray_says_of_its_connection() -> None:
    verdict = judge([_ended_by_launcher(0), _lost_process(1, RuntimeError(REPORTED))], out_of_memory=False)
    assert verdict.culprit.rank == 1
    assert verdict.headline == "rank 1 failed first: its process is gone"
    drawn = " ".join(panel(verdict, machine_rank=0, num_machines=1, logs="above").split())
    assert "Connection reset by peer." in drawn
    assert "common causes" not in drawn
    assert "dmesg" in drawn


def test_a_crash_is_known_by_what_faulthandler_wrote_and_a_kill_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "rank"
    folder.mkdir()
    (folder / "crash.txt").write_text("Fatal Python error: Segmentation fault\n")
    ending = read_ending(1, str(folder / "error.json"))
    assert ending is not None
    assert ending.signal_name == "SIGSEGV"
    assert not folder.exists()
    assert read_ending(1, str(folder / "error.json")) is None


def test_without_ray_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.tools.clusters.ray.launcher.has_package", lambda name: False)
    with pytest.raises(UnsupportedSettingError, match=r"Ray is not installed. Run `pip install \"meshwright\[ray\]\"`"):
        ray_launcher(print)
