from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshwright.runtime.devices import machine


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    return tmp_path


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    "name",
    ["nvidia4", "nvidia12", "dxg", "kfd", "dri/renderD129", "davinci3", "neuron5", "accel/accel7", "hl2", "mtgpu.1"],
)
def test_any_device_file_counts_not_only_the_first(root: Path, name: str) -> None:
    assert not machine.has_device_files(*machine.DEVICE_FILES)
    write(root / "dev" / name)
    assert machine.has_device_files(*machine.DEVICE_FILES)


@pytest.mark.parametrize("name", ["nvidiactl", "nvidia-uvm", "dri/card0", "davinci_manager"])
def test_a_file_of_a_driver_without_a_device_does_not_count(root: Path, name: str) -> None:
    write(root / "dev" / name)
    assert not machine.has_device_files(*machine.DEVICE_FILES)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_a_quota_is_read_from_both_versions_of_control_groups(
    root: Path, files: dict[str, str], cores: float | None
) -> None:
    for name, text in files.items():
        write(root / "sys/fs/cgroup" / name, text)
    assert machine.cpu_quota() == cores


def test_the_cores_of_this_machine_are_those_of_the_kernel() -> None:
    if hasattr(os, "sched_getaffinity"):
        assert machine.usable_cores() == sorted(os.sched_getaffinity(0))


def test_without_the_kernels_file_python_is_asked(root: Path) -> None:
    assert len(machine.usable_cores()) >= 1


def test_a_list_of_cores_is_parsed() -> None:
    assert machine.parse_cpu_list("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert machine.parse_cpu_list("\n") == []
