"""Questions to NVIDIA's driver, answered by recorded machines."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

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


@pytest.mark.parametrize(
    ("name", "kind", "chosen", "expected"),
    [
        ("rtx_4090_old_driver", "cuda", {}, ("1", "1")),
        ("rtx_4090_old_driver", "cuda", {"NCCL_P2P_DISABLE": "0"}, ("0", "1")),
        ("rtx_4090_old_driver", "cpu", {}, (None, None)),
        ("hgx_h100", "cuda", {}, (None, None)),
    ],
)
def test_a_process_that_joins_a_group_avoids_the_fault_of_recorded_machines(
    name: str, kind: str, chosen: dict[str, str], expected: tuple[str | None, str | None]
) -> None:
    with on_machine(name), pytest.MonkeyPatch.context() as patch:
        for variable in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"):
            patch.setenv(variable, "")
            patch.delenv(variable)  # so that it is gone again afterwards
        for variable, value in chosen.items():
            patch.setenv(variable, value)
        device.prepare_collectives(torch.device(kind))
        assert (os.environ.get("NCCL_P2P_DISABLE"), os.environ.get("NCCL_IB_DISABLE")) == expected


@pytest.mark.parametrize(
    ("chosen", "expected", "warns"), [(None, "0", False), ("1", "0", False), ("2", "2", False), ("3", "0", True)]
)
def test_nccl_is_told_not_to_end_a_process_that_survives(chosen: str | None, expected: str, warns: bool) -> None:
    names = ("ASYNC_ERROR_HANDLING", "DUMP_ON_TIMEOUT", "USE_COMM_NONBLOCKING", "NONBLOCKING_TIMEOUT")
    with pytest.MonkeyPatch.context() as patch:
        for name in (*names, "WAIT_TIMEOUT_DUMP_MILSEC"):
            patch.setenv(f"TORCH_NCCL_{name}", "")
            patch.delenv(f"TORCH_NCCL_{name}")
        patch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "7")
        if chosen is not None:
            patch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", chosen)
        with pytest.warns(UserWarning, match="--survive sets it to 0") if warns else nullcontext():
            device.prepare_to_survive()
        assert [os.environ[f"TORCH_NCCL_{name}"] for name in names] == [expected, "0", "1", "7"]


def test_one_gpu_has_no_peer_of_recorded_machines() -> None:
    with on_machine("workstation_one_gpu"):
        assert nvidia.p2p_fault() is None


def test_the_driver_of_wsl_is_asked_by_nvidia_smi_of_recorded_machines() -> None:
    with on_machine("wsl2_rtx_4080"):
        assert get_driver_version() == "546.33"
        with pytest.raises(
            RuntimeError, match=r"the query of nvidia-smi for serial failed: .* Is NVIDIA's driver here"
        ):
            nvidia.query("serial")


def test_a_machine_without_the_driver_says_what_failed_of_recorded_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_machine("laptop_cpu"), monkeypatch.context() as patch:
        patch.setenv("PATH", "/nonexistent")
        with pytest.raises(RuntimeError, match="the query of nvidia-smi for driver_version failed"):
            get_driver_version()


def test_gpus_without_a_device_file_are_not_of_this_container_of_recorded_machines(tmp_path: Path) -> None:
    RecordedMachine.load("hgx_h100").write(tmp_path)  # /proc of the whole machine
    for minor in range(6):
        (tmp_path / f"dev/nvidia{minor}").unlink()
    with on_machine("hgx_h100", root=tmp_path):
        assert [gpu.address for gpu in nvidia.gpus()] == ["0000:d1:00.0", "0000:df:00.0"]
