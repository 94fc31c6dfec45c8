"""Copies for a save in the background are of their moment, whoever computes on which stream."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from meshwright import Accelerator, FullyShardedDataParallelPlugin
from meshwright.checkpoint.commit.staging import Staging
from tests.simulated_accelerator import (
    on_a_simulated_accelerator,
    run_on_a_simulated_accelerator,
    set_delays,
    synchronization_removed,
)
from tests.simulated_accelerator.device_module import device_module
from tests.simulated_accelerator.faults import moves_in_place
from tests.sizes import sized

SLOW = {"copy_latency": 2e-3, "kernel_time": 2e-3}
REPEATS = sized(gate=3, nightly=100)


def staged_while_a_stream_goes_on() -> list[float]:
    """Stage a tensor that a stream of the user's is about to write, and that it writes again right after."""
    staging, stream = Staging(), torch.Stream("gpu")
    tensor = torch.zeros(64, device="gpu")
    torch.accelerator.synchronize()
    with stream:
        for value in (1.0, 2.0):
            tensor.fill_(value)
        staged = staging.copy("model", {"weight": tensor})
        tensor.fill_(3.0)
    staging.synchronize()
    copied: torch.Tensor = staged["weight"]
    assert copied.is_pinned()
    return copied.tolist()


@on_a_simulated_accelerator
def test_a_copy_is_of_its_moment_on_the_stream_of_the_caller_on_a_simulated_accelerator() -> None:
    for repeat in range(REPEATS):
        set_delays(**SLOW, jitter_seed=repeat)
        assert staged_while_a_stream_goes_on() == [2.0] * 64


@on_a_simulated_accelerator
def test_a_copy_that_does_not_wait_for_the_stream_is_noticed_on_a_simulated_accelerator() -> None:
    wrong = 0
    for repeat in range(5):
        set_delays(**SLOW, jitter_seed=repeat)
        with synchronization_removed():
            wrong += staged_while_a_stream_goes_on() != [2.0] * 64
        torch.accelerator.synchronize()
    assert wrong > 0


@on_a_simulated_accelerator
def test_the_host_does_not_wait_for_copies_on_a_simulated_accelerator() -> None:
    staging, tensor = Staging(), torch.ones(1 << 18, device="gpu")
    staging.copy("model", {"weight": tensor})  # allocates
    staging.synchronize()
    set_delays(copy_bytes_per_second=5e5)  # two seconds
    begin = time.perf_counter()
    staging.copy("model", {"weight": tensor})
    blocked = time.perf_counter() - begin
    staging.synchronize()
    assert blocked <= 0.15 * (time.perf_counter() - begin)


def contexts_after_saving(folder: str, sharded: bool) -> list[int]:
    plugin = FullyShardedDataParallelPlugin() if sharded else None
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = torch.nn.Linear(4, 4)
    with moves_in_place():
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(2, 4, device=accelerator.device)).sum())
    optimizer.step()
    accelerator.save_state(folder, wait=False)
    accelerator.load_state(folder)
    accelerator.end_training()
    return device_module.contexts()


@pytest.mark.parametrize("sharded", [False, True])
def test_a_save_in_the_background_opens_the_device_of_its_rank_alone_on_simulated_accelerators(
    sharded: bool, tmp_path: Path
) -> None:
    found = run_on_a_simulated_accelerator(
        contexts_after_saving, world_size=2, in_new_processes=True, folder=str(tmp_path / "saved"), sharded=sharded
    )
    assert found == [[0], [1]]
