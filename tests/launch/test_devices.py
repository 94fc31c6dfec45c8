from __future__ import annotations

import sys
from pathlib import Path

import pytest

from meshwright.launch.devices import count_accelerators, count_cores
from meshwright.runtime.devices import machine
from tests.recorded_machines import on_machine


def test_devices_are_counted_where_the_first_is_missing_of_recorded_machines() -> None:
    with on_machine("container_gpus_4_to_7"):
        assert not (machine.ROOT / "dev/nvidia0").exists()
        assert count_accelerators() == 4


def test_torch_is_not_imported_without_a_device_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(machine, "PLATFORM", "linux")
    monkeypatch.setitem(sys.modules, "meshwright.runtime.devices.device", None)  # an import of it fails
    assert count_accelerators() == 0


def test_cores_are_limited_by_a_quota_of_recorded_machines() -> None:
    with on_machine("kubernetes_pod"):
        assert count_cores() == 8
    with on_machine("container_legacy_quota"):
        assert count_cores() == 1
