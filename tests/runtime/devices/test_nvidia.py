"""Questions to NVIDIA's driver, answered by recorded machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.runtime.devices import device, nvidia
from meshwright.runtime.devices.hardware import check_cuda_p2p_ib_support, get_driver_version
from tests.recorded_machines import RecordedMachine, on_machine


class NoTorch:
    """In the place of torch, for code that must not ask it."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"torch.{name} was used: CUDA may be initialised by it")


@pytest.mark.parametrize(("name", "supported"), [("rtx_4090_old_driver", False), ("hgx_h100", True), ("mi300x", True)])
def test_p2p_support_is_answered_without_torch_of_recorded_machines(
    name: str, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_machine(name), monkeypatch.context() as patch:
        patch.setattr(device, "torch", NoTorch())
        assert check_cuda_p2p_ib_support() == supported


@pytest.mark.parametrize(
    ("model", "driver", "fault"),
    [
        ("NVIDIA GeForce RTX 4090", "535.183.01", True),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "545.29.06", True),
        ("NVIDIA GeForce RTX 4090", "550.40.07", False),
        ("NVIDIA GeForce RTX 3090", "535.183.01", False),
        ("Quadro RTX 4000", "470.82.01", False),
        ("NVIDIA RTX 4000 Ada Generation", "535.183.01", False),
    ],
)
def test_the_fault_is_of_old_drivers_with_rtx_40_of_recorded_machines(
    model: str, driver: str, fault: bool, tmp_path: Path
) -> None:
    RecordedMachine.load("rtx_4090_old_driver").write(tmp_path)
    files = [*(tmp_path / "proc/driver/nvidia").rglob("information"), tmp_path / "proc/driver/nvidia/version"]
    for file in files:
        text = file.read_text().replace("NVIDIA GeForce RTX 4090", model).replace("535.183.01", driver)
        file.write_text(text)
    with on_machine("rtx_4090_old_driver", root=tmp_path):
        assert get_driver_version() == driver
        assert nvidia.p2p_fault() == (f"{model}, driver {driver}" if fault else None)


def test_one_gpu_has_no_peer_of_recorded_machines() -> None:
    with on_machine("workstation_one_gpu"):
        assert nvidia.p2p_fault() is None


def test_the_driver_of_wsl_is_asked_by_nvidia_smi_of_recorded_machines() -> None:
    with on_machine("wsl2_rtx_4080"):
        assert get_driver_version() == "546.33"
        with pytest.raises(
            RuntimeError, match=r"nvidia-smi was asked for serial and failed: .* Is NVIDIA's driver here"
        ):
            nvidia.query("serial")


def test_a_machine_without_the_driver_says_what_failed_of_recorded_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_machine("laptop_cpu"), monkeypatch.context() as patch:
        patch.setenv("PATH", "/nonexistent")
        with pytest.raises(RuntimeError, match="nvidia-smi was asked for driver_version and failed"):
            get_driver_version()


def test_gpus_without_a_device_file_are_not_of_this_container_of_recorded_machines(tmp_path: Path) -> None:
    RecordedMachine.load("hgx_h100").write(tmp_path)  # /proc of the whole machine
    for minor in range(6):
        (tmp_path / f"dev/nvidia{minor}").unlink()
    with on_machine("hgx_h100", root=tmp_path):
        assert [gpu.address for gpu in nvidia.gpus()] == ["0000:d1:00.0", "0000:df:00.0"]
