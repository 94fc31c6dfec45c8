"""The library where results are late: loaders, offloaded weights, checkpoints and low precision, beside the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from meshwright import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin, cpu_offload, dispatch_model
from tests.ranks.worker import forget_everything
from tests.simulated_accelerator import (
    on_a_simulated_accelerator,
    run_on_a_simulated_accelerator,
    set_delays,
)
from tests.simulated_accelerator.faults import delays, moves_in_place
from tests.sizes import sized

from .training import assert_same, train

REPEATS = sized(gate=2, nightly=100)
SLOW = {"copy_latency": 2e-3, "kernel_time": 200e-6}
BATCH, FEATURES = 4, 6


def data() -> TensorDataset:
    return TensorDataset(torch.arange(24.0 * FEATURES).reshape(24, FEATURES) / 100)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


# --- Loaders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
@on_a_simulated_accelerator
def test_late_batches_arrive_whole_on_a_simulated_accelerator(pinned: bool, workers: int) -> None:
    config = DataLoaderConfiguration(non_blocking=True)
    accelerator = Accelerator(dataloader_config=config)
    for repeat in range(REPEATS):
        set_delays(**SLOW, jitter_seed=repeat)
        loader = DataLoader(data(), BATCH, pin_memory=pinned, num_workers=workers)
        sums = [batch.sum(dim=1) for (batch,) in accelerator.prepare(loader)]
        torch.testing.assert_close(torch.cat(sums).cpu(), data().tensors[0].sum(dim=1))


def dispatched(repeat: int) -> Tensor:
    set_delays(**SLOW, jitter_seed=repeat)
    config = DataLoaderConfiguration(non_blocking=True, dispatch_batches=True)
    accelerator = Accelerator(dataloader_config=config)
    loader = accelerator.prepare(DataLoader(data(), BATCH, pin_memory=True))
    return torch.cat([accelerator.gather_for_metrics(batch.sum(dim=1)) for (batch,) in loader]).cpu()


def test_late_batches_of_a_dispatching_rank_arrive_whole_on_simulated_accelerators() -> None:
    for repeat in range(REPEATS):
        for found in run_on_a_simulated_accelerator(dispatched, world_size=2, repeat=repeat):
            torch.testing.assert_close(found, data().tensors[0].sum(dim=1))


# --- Offloaded weights ------------------------------------------------------------------------------------------------


def outputs_of(model: nn.Module) -> Tensor:
    inputs = data().tensors[0]
    with torch.no_grad():
        return torch.cat([model(part.to("gpu:0")).to("cpu") for part in inputs.split(BATCH)])


@pytest.mark.parametrize("way", ["cpu_offload", "two devices", "host", "disk"])
@on_a_simulated_accelerator
def test_offloaded_weights_arrive_before_they_are_used_on_a_simulated_accelerator(way: str, tmp_path: Path) -> None:
    expected = network()(data().tensors[0])
    for repeat in range(REPEATS):
        set_delays(**SLOW, jitter_seed=repeat)
        if way == "cpu_offload":
            model = cpu_offload(network(), execution_device=torch.device("gpu", 0))
        else:
            middle = {"two devices": 1, "host": "cpu", "disk": "disk"}[way]
            places = {"0": 0, "1": 0, "2": middle, "3": middle, "4": 0}
            model = dispatch_model(network(), places, main_device=0, offload_dir=str(tmp_path / str(repeat)))
        torch.testing.assert_close(outputs_of(model), expected)


# --- Checkpoints ------------------------------------------------------------------------------------------------------


def prepared() -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator()
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    return accelerator, model, optimizer


def step(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    inputs = data().tensors[0][:BATCH].to(accelerator.device, non_blocking=True)
    accelerator.backward(model(inputs).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def parameters(model: nn.Module) -> list[Tensor]:
    return [param.detach().cpu().clone() for param in model.parameters()]


def save_and_go_on(folder: str, wait: bool, repeat: int) -> list[list[Tensor]]:
    """Save while work is under way, change everything, and return what was there, and what a load brings back."""
    set_delays(**SLOW, jitter_seed=repeat)
    accelerator, model, optimizer = prepared()
    for _ in range(3):
        step(accelerator, model, optimizer)
    accelerator.save_state(folder, wait=wait)
    there = parameters(model)
    step(accelerator, model, optimizer)
    after_a_step = parameters(model)
    accelerator.load_state(folder)
    loaded = parameters(model)
    step(accelerator, model, optimizer)
    again = parameters(model)
    forget_everything()
    return [there, loaded, after_a_step, again]


@pytest.mark.parametrize("wait", [True, False], ids=["foreground", "background"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_holds_what_was_computed_when_it_was_asked_for_on_simulated_accelerators(
    world_size: int, wait: bool, tmp_path: Path
) -> None:
    for repeat in range(REPEATS):
        folder = str(tmp_path / str(repeat))
        for there, loaded, after_a_step, again in run_on_a_simulated_accelerator(
            save_and_go_on, world_size=world_size, folder=folder, wait=wait, repeat=repeat
        ):
            assert not any(tensor.isnan().any() for tensor in there)
            torch.testing.assert_close(loaded, there, rtol=0, atol=0)
            torch.testing.assert_close(again, after_a_step, rtol=0, atol=0)


# --- Low precision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(("way", "world_size"), [("one", 1), ("ddp2", 2), ("fsdp2", 2)])
def test_low_precision_gives_what_the_cpu_gives_on_simulated_accelerators(
    way: str, world_size: int, precision: str
) -> None:
    options = {"world_size": world_size, "way": way, "mixed_precision": precision}
    expected = run_on_a_simulated_accelerator(train, cpu=True, **options)
    for repeat in range(REPEATS):
        found = run_on_a_simulated_accelerator(train, jitter_seed=repeat, **options)
        for of_rank, of_cpu in zip(found, expected, strict=True):
            assert_same(of_rank, of_cpu, rtol=1e-2, atol=1e-3)


# --- What the host asks for -------------------------------------------------------------------------------------------


@on_a_simulated_accelerator
def test_metrics_are_read_when_they_are_there_on_a_simulated_accelerator() -> None:
    accelerator = Accelerator()
    with delays(**SLOW):
        value = torch.arange(4.0, device=accelerator.device).square()
        assert accelerator.gather_for_metrics(value).tolist() == [0.0, 1.0, 4.0, 9.0]
        assert accelerator.reduce(value, "sum").tolist() == [0.0, 1.0, 4.0, 9.0]


# --- What the library leaves on a device ------------------------------------------------------------------------------


def memory_of_a_load(folder: str, sharded: bool) -> tuple[int, int]:
    """Save and load a model with AdamW; return its bytes on this rank's device, and what the load took on top."""
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin() if sharded else None)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    with moves_in_place():
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(2, 64, device=accelerator.device)).sum())
    optimizer.step()
    optimizer.zero_grad()
    accelerator.save_state(folder)
    index = accelerator.process_index
    before = torch.accelerator.memory_allocated(index)
    torch.accelerator.reset_peak_memory_stats(index)
    accelerator.load_state(folder)
    return before, torch.accelerator.max_memory_allocated(index) - before


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_a_load_holds_no_second_copy_of_the_run_on_simulated_accelerators(sharded: bool, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    for run, extra in run_on_a_simulated_accelerator(memory_of_a_load, world_size=2, folder=folder, sharded=sharded):
        assert extra <= 0.35 * run, "a parameter and its moments are 3 of 8 layers at most"


def device_of_the_group() -> str:
    Accelerator()
    return str(torch.distributed.group.WORLD.bound_device_id)  # type: ignore[union-attr]


def test_the_process_group_is_not_bound_to_a_device_on_simulated_accelerators() -> None:
    """Else torch splits it for every later group, and ranks outside wait for ranks that never come."""
    assert run_on_a_simulated_accelerator(device_of_the_group, world_size=2) == ["None", "None"]
