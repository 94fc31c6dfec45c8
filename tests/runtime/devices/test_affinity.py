"""Shares of the cores, on recorded machines; `tests/recorded_machines` has the share of every rank of all of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from meshwright.runtime.devices import affinity
from meshwright.runtime.devices.affinity import nodes_of_devices, set_numa_affinity, share_of_cores
from tests.recorded_machines import RecordedMachine, on_machine, uuid_of


@pytest.fixture(autouse=True)
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The calls that would have pinned this process."""
    calls: list[list[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: calls.append(cores), raising=False)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    return calls


def test_the_threads_of_a_core_stay_together_of_recorded_machines() -> None:
    with on_machine("laptop_cpu"):
        assert [share_of_cores(rank, 4, []) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with on_machine("workstation_one_gpu"):
        assert [share_of_cores(rank, 2, []) for rank in range(2)] == [
            [0, 1, 2, 3, 8, 9, 10, 11],
            [4, 5, 6, 7, *range(12, 16)],
        ]


def test_threads_are_divided_only_where_cores_do_not_suffice_of_recorded_machines() -> None:
    with on_machine("laptop_cpu"):
        assert [share_of_cores(rank, 8, []) for rank in range(8)] == [[core] for core in range(8)]
        assert share_of_cores(9, 10, []) == [1], "more processes than threads: in turn"


def test_without_devices_the_nodes_are_taken_in_order_of_recorded_machines() -> None:
    with on_machine("dgx_a100"):
        first, last = (set_numa_affinity(rank, local_processes=8, near_devices=False) for rank in (0, 7))
    assert first == [*range(16), *range(128, 144)]
    assert last == [*range(112, 128), *range(240, 256)]


def test_fewer_processes_than_devices_take_the_first_of_recorded_machines() -> None:
    with on_machine("dgx_a100"):
        assert nodes_of_devices(2) == [3, 3, 1, 1, 7, 7, 5, 5]
        assert set_numa_affinity(0, local_processes=1) == [*range(48, 64), *range(176, 192)]


@pytest.mark.parametrize(
    ("variable", "value", "visible", "nodes"),
    [
        ("CUDA_VISIBLE_DEVICES", "6,2", 2, [5, 1]),
        ("CUDA_VISIBLE_DEVICES", f"{uuid_of(4)},{uuid_of(3)}", 2, [7, 1]),
        ("CUDA_VISIBLE_DEVICES", f"{uuid_of(4)[:12]}", 1, [7]),
        ("CUDA_VISIBLE_DEVICES", "0,99", 1, []),
        ("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2", 1, []),
        ("SLURM_JOB_GPUS", "6,7", 2, [5, 5]),
    ],
)
def test_visible_devices_choose_the_nodes_of_recorded_machines(
    variable: str, value: str, visible: int, nodes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_machine("dgx_a100"):
        monkeypatch.setenv(variable, value)
        monkeypatch.setattr(affinity.devices, "count", lambda: visible)
        assert nodes_of_devices(1) == nodes


@pytest.mark.parametrize("visible", ["0,1", "6,7"])
def test_devices_of_a_slurm_job_are_numbered_in_two_ways_of_recorded_machines(
    visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its device cgroup, Slurm numbers the devices of the job from 0."""
    with on_machine("dgx_a100"):
        monkeypatch.setenv("SLURM_STEP_GPUS", "6,7")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr(affinity.devices, "count", lambda: 2)
        assert nodes_of_devices(2) == [5, 5]


def test_gpus_of_two_models_have_no_known_order_of_recorded_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RecordedMachine.load("hgx_h100").write(tmp_path)
    information = tmp_path / "proc/driver/nvidia/gpus/0000:1b:00.0/information"
    information.write_text(information.read_text().replace("H100", "H200"))
    with on_machine("hgx_h100", root=tmp_path):
        assert nodes_of_devices(8) == []
        assert set_numa_affinity(0, local_processes=8)[:2] == [0, 1], "in order, then"
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        assert nodes_of_devices(8) == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_node_whose_cores_are_not_usable_is_not_chosen_of_recorded_machines(tmp_path: Path) -> None:
    RecordedMachine.load("slurm_gpu_per_task").write(tmp_path)
    (tmp_path / "proc/thread-self/status").write_text("Cpus_allowed_list:\t0-3,64-67\n")
    with on_machine("slurm_gpu_per_task", root=tmp_path, local_rank=1):
        assert set_numa_affinity(1) == [1, 65], "the cores that there are, in order"


def test_what_slurm_has_bound_stays_bound_of_recorded_machines(
    tmp_path: Path, pinned: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    RecordedMachine.load("slurm_gpu_per_task").write(tmp_path)
    (tmp_path / "proc/thread-self/status").write_text("Cpus_allowed_list:\t16-31\n")
    with on_machine("slurm_gpu_per_task", root=tmp_path, local_rank=1), monkeypatch.context() as patch:
        patch.setenv("SLURM_CPU_BIND_TYPE", "mask_cpu:")
        assert set_numa_affinity(1) == list(range(16, 32)), "not divided by the number of tasks once more"
        assert pinned == []
        for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
            patch.setenv(name, value)  # torchelastic inside of the task: its processes share the cores
        assert set_numa_affinity(1) == list(range(24, 32))


def test_torch_has_no_more_threads_than_cores_of_recorded_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 32)
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    with on_machine("dgx_a100", local_rank=0):
        set_numa_affinity(0)
    assert numbers == [16]


def test_a_machine_without_numa_nodes_divides_its_cores(tmp_path: Path) -> None:
    (tmp_path / "proc/thread-self").mkdir(parents=True)
    (tmp_path / "proc/thread-self/status").write_text("Cpus_allowed_list:\t0-3\n")
    with on_machine("laptop_cpu", root=tmp_path):
        assert [share_of_cores(rank, 2, [0, 0]) for rank in range(2)] == [[0, 1], [2, 3]]
