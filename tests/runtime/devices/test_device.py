"""Which device a process takes, and which backend, on recorded machines and with stand-ins for packages of devices."""

from __future__ import annotations

import sys
import warnings
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.runtime.devices import device
from tests.recorded_machines import on_machine


def chosen(local_rank: int, launcher: str | None = "torchrun") -> str:
    return str(device.device_for(local_rank=local_rank, world_size=8, cpu=False, requested=None, launcher=launcher))


def test_a_process_with_one_device_of_its_own_takes_it_of_recorded_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_machine("workstation_one_gpu"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
        assert [chosen(rank) for rank in range(4)] == ["cuda:0"] * 4


def test_without_a_variable_both_causes_are_named_of_recorded_machines() -> None:
    with on_machine("workstation_one_gpu"), pytest.raises(RuntimeError) as refusal:
        chosen(3)
    message = str(refusal.value)
    assert "Local rank 3 on host" in message
    assert "Start at most 1 processes on this host, or pass cpu=True" in message
    assert "set CUDA_VISIBLE_DEVICES, as Slurm does with --gpus-per-task=1" in message


def test_a_variable_with_several_devices_gives_no_process_its_own_of_recorded_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with on_machine("rtx_4090_old_driver"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        assert [chosen(rank) for rank in range(2)] == ["cuda:0", "cuda:1"]
        with pytest.raises(RuntimeError, match=r"Local rank 2 .*2 cuda device\(s\) are visible"):
            chosen(2)


def test_the_variable_of_another_kind_of_device_does_not_count_of_recorded_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with on_machine("intel_arc"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        with pytest.raises(RuntimeError, match="set ZE_AFFINITY_MASK, as"):
            chosen(1)
        monkeypatch.setenv("ZE_AFFINITY_MASK", "1")
        assert chosen(1) == "xpu:0"


def test_tasks_of_slurm_with_several_gpus_each_take_one_of_their_own_of_recorded_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with on_machine("rtx_4090_old_driver"):
        monkeypatch.setenv("SLURM_GPUS_PER_TASK", "2")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        assert [chosen(rank, "Slurm") for rank in (0, 2, 3)] == ["cuda:0"] * 3
        with pytest.raises(RuntimeError, match="Local rank 2"):
            chosen(2, "torchrun")  # inside of one task: its processes share the two


def test_gaudi_is_there_once_its_package_is_imported_by_a_stand_in() -> None:
    with on_machine("gaudi2"):
        assert "habana_frameworks.torch" not in sys.modules
        assert device.accelerator_type() == "hpu"
        assert "habana_frameworks.torch" in sys.modules


def test_the_package_of_gaudi_is_left_alone_on_other_machines_by_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_machine("hgx_h100"):
        monkeypatch.setattr(device, "has_package", lambda name: True)  # an image with everything, without the device
        assert device.accelerator_type() == "cuda"
        assert "habana_frameworks" not in sys.modules


def test_xpus_without_xccl_use_gloo_and_say_so_by_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    xpu = torch.device("xpu", 0)
    monkeypatch.setattr(dist, "is_xccl_available", lambda: True, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert device.collective_backend(xpu, "nccl") == "cpu:gloo,xpu:xccl"
    monkeypatch.setattr(dist, "is_xccl_available", lambda: False, raising=False)
    with pytest.warns(UserWarning, match="built without xccl, so the process group of the XPUs uses gloo"):
        assert device.collective_backend(xpu, None) == "cpu:gloo,xpu:gloo"
    monkeypatch.delattr(dist, "is_xccl_available")
    with pytest.warns(UserWarning, match="built without xccl"):
        assert device.collective_backend(xpu, None) == "cpu:gloo,xpu:gloo"
    assert device.collective_backend(xpu, "ccl") == "cpu:gloo,xpu:ccl", "a choice is a choice"


def test_a_device_without_a_name_has_that_of_its_kind_of_recorded_machines() -> None:
    with on_machine("mac_m_series"):
        assert device.names() == ["mps"]


def test_a_group_of_nccl_beside_gloo_has_nccls_timeout_with_a_stand_in_for_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist.distributed_c10d, "default_pg_nccl_timeout", timedelta(minutes=10))
    assert device.default_timeout("cpu:gloo,cuda:nccl") == timedelta(minutes=10)
    assert device.default_timeout("gloo") is None


def test_a_device_that_does_not_tell_its_free_memory_is_asked_for_its_size_with_a_stand_in_for_an_xpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(index: int) -> None:
        raise RuntimeError("The device (Intel Arc) doesn't support querying the available free memory")

    xpu = SimpleNamespace(
        mem_get_info=refuse,
        get_device_properties=lambda index: SimpleNamespace(total_memory=1000),
        memory_reserved=lambda index: 300,
    )
    monkeypatch.setattr(device, "accelerator_type", lambda: "xpu")
    monkeypatch.setattr(torch, "xpu", xpu)
    assert device.free_memory(0) == 700
    del xpu.memory_reserved
    assert device.free_memory(0) is None


def test_one_side_stream_serves_a_device_however_it_is_named_with_a_simulated_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "_side_streams", {})
    monkeypatch.setattr(torch, "Stream", lambda where: SimpleNamespace(device=where))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    first = device.side_stream(torch.device("cuda"))
    assert all(device.side_stream(torch.device("cuda")) is first for _ in range(40))
    assert device.side_stream(torch.device("cuda", 0)) is first
    assert device.side_stream(torch.device("cuda", 1)) is not first


class Copies(TorchDispatchMode):
    """Note the operations that copy from one device to another."""

    def __init__(self) -> None:
        super().__init__()
        self.non_blocking: list[bool] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten._to_copy.default:
            self.non_blocking.append(bool((kwargs or {}).get("non_blocking", False)))
        return function(*args, **(kwargs or {}))


def test_a_number_comes_to_a_device_without_a_wait_with_simulated_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_streams", lambda where: True)
    with Copies() as copies:
        for number in (3, 0.5, torch.tensor(3)):
            assert device.number_on(torch.device("meta"), number).shape == ()
    assert copies.non_blocking == [True], "only the tensor is copied"
    assert device.number_on(torch.device("cpu"), 3).dtype == torch.int64
    assert device.number_on(torch.device("cpu"), 0.5).dtype == torch.get_default_dtype()


def test_large_pinned_memory_is_taken_as_asked_unless_the_user_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append, raising=False)
    for chosen_by_user in ("", "max_split_size_mb:64", "pinned_max_round_threshold_mb:16"):
        monkeypatch.setattr(
            torch._C, "_accelerator_getAllocatorSettings", lambda chosen=chosen_by_user: chosen, raising=False
        )
        device._take_pinned_memory_as_asked.cache_clear()
        device._take_pinned_memory_as_asked()
    device._take_pinned_memory_as_asked.cache_clear()
    assert given == ["pinned_max_round_threshold_mb:1"] * 2


def test_sums_on_ascend_are_in_float32_with_a_simulated_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "finest_float", lambda where: torch.float64)
    kinds = {kind: device.finest_reduced_float(SimpleNamespace(type=kind)) for kind in ("npu", "xpu", "cuda")}  # type: ignore[arg-type]
    assert kinds == {"npu": torch.float32, "xpu": torch.float64, "cuda": torch.float64}
