"""Training with blocks on the host is bitwise equal to training in memory."""

from __future__ import annotations

import copy
import gc
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import Accelerator, FullyShardedDataParallelPlugin, OffloadConfig
from meshwright.errors import UnsupportedSettingError
from tests.parallel.replicas.offload.training import Stack, assert_bit_equal, train
from tests.ranks import run_on_ranks
from tests.simulated_accelerator import (
    device_module,
    on_a_simulated_accelerator,
    run_on_a_simulated_accelerator,
    set_delays,
    synchronization_removed,
)
from tests.simulated_accelerator.faults import delays
from tests.sizes import sized

CASES: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer": "SGD"},
    "AdamW": {"optimizer": "AdamW"},
    "clipping": {"max_norm": 0.1},
    "recomputation": {"recomputes": "yes"},
    "reentrant recomputation": {"recomputes": "reentrant"},
    "loss.backward()": {"own_backward": True},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"mixed_precision": "bf16"},
}


@pytest.mark.parametrize("case", CASES)
def test_training_is_bit_equal_to_training_in_memory(case: str) -> None:
    assert_bit_equal(train(offload="host", **CASES[case]), train(**CASES[case]))


def on_the_device(case: str, jitter_seed: int = 0) -> None:
    set_delays(copy_latency=1e-3, kernel_time=1e-4, jitter_seed=jitter_seed)
    with delays(copy_latency=0.0, kernel_time=0.0):
        expected = train(**CASES[case])
    assert_bit_equal(train(offload="host", **CASES[case]), expected)


@pytest.mark.parametrize("case", CASES)
def test_training_is_bit_equal_on_a_simulated_accelerator(case: str) -> None:
    run_on_a_simulated_accelerator(on_the_device, case=case)


def without_delays(memory: int | None = None, **options: Any) -> tuple[dict[str, Any], int]:
    """Train on the device, perhaps with a memory limit; return what came out, and the peak of its memory."""
    gc.collect()
    torch.accelerator.reset_peak_memory_stats()
    with (
        delays(copy_latency=0.0, kernel_time=0.0, copy_bytes_per_second=0.0),
        nullcontext() if memory is None else device_module.memory_limit(memory),
    ):
        found = train(**options)
    return found, torch.accelerator.max_memory_allocated()


@pytest.mark.parametrize(("optimizer", "num_blocks"), [("SGD", 71), ("AdamW", 48)])
def test_weights_and_state_of_20_times_the_memory_train_on_a_simulated_accelerator(
    optimizer: str, num_blocks: int
) -> None:
    options: dict[str, Any] = {
        "optimizer": optimizer,
        "num_blocks": num_blocks,
        "steps": sized(gate=12, nightly=50),
        "width": 128,
    }
    limit = 7 * sum(param.nbytes for param in Stack(1, width=128).blocks[0].parameters())
    [(expected, in_memory)] = run_on_a_simulated_accelerator(without_delays, **options)
    [(found, peak)] = run_on_a_simulated_accelerator(
        without_delays, memory=limit, offload="host", recomputes="yes", **options
    )
    assert_bit_equal(found, expected)
    state = sum(value.nbytes for state in found["moments"] for value in state.values())
    assert sum(value.nbytes for value in found["parameters"].values()) + state >= 20 * limit
    assert peak <= limit < in_memory / 20


def test_a_line_says_what_is_where_and_what_it_costs(capfd: pytest.CaptureFixture[str]) -> None:
    report = train(offload="host")["report"]
    assert capfd.readouterr().err.count(report) == 1
    assert re.search(
        r"5 blocks \(0.0 MB\) on the host, the rest \(0.0 MB\) on cpu; .* in and .* out per step; \d+ % of the step",
        report,
    )


@pytest.mark.parametrize("reads", ["state_dict", "evaluation", "checkpoint"])
def test_a_prepared_model_is_read_as_any_other(reads: str, tmp_path: Path) -> None:
    accelerator, model, optimizer = prepared()
    batch = torch.ones(2, 4)
    with torch.no_grad():
        expected = model(batch)
    if reads == "state_dict":
        other = Stack(3)
        other.load_state_dict(accelerator.get_state_dict(model))
        assert torch.equal(other(batch), expected)
    elif reads == "evaluation":
        model.eval()
        assert torch.equal(model(batch), expected)
        model.train()
        accelerator.backward(model(batch).sum())
    else:
        accelerator.save_state(str(tmp_path / "saved"))
        accelerator.backward(model(batch).sum())
        optimizer.step()
        assert not torch.equal(model(batch), expected)
        accelerator.load_state(str(tmp_path / "saved"))
        assert torch.equal(model(batch), expected)


def prepared() -> tuple[Accelerator, Stack, Any]:
    accelerator = Accelerator(offload="host")
    model = Stack(3)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    return accelerator, model, optimizer


def resume(folder: str, steps_before: int) -> dict[str, Any]:
    """Train 6 steps, or resume after some of them from a checkpoint of another run."""

    def save(step: int, accelerator: Accelerator) -> None:
        if step + 1 == steps_before:
            accelerator.save_state(folder)

    def load(step: int, accelerator: Accelerator) -> None:
        if step + 1 == steps_before:
            accelerator.load_state(folder)

    saved = train(offload="host", steps=6, on_step=save)
    resumed = train(offload="host", steps=6, on_step=load, seed=1)
    assert resumed["losses"][:steps_before] != saved["losses"][:steps_before]
    for each in (saved, resumed):
        del each["losses"][:steps_before]
    assert_bit_equal(resumed, saved)
    return resumed


def test_a_run_that_resumes_goes_on_exactly(tmp_path: Path) -> None:
    resume(str(tmp_path / "saved"), steps_before=3)


def test_weights_that_change_in_place_between_steps_are_used() -> None:
    _, model, _ = prepared()
    batch = torch.ones(2, 4)
    with torch.no_grad():
        before = model(batch)
        for param in model.blocks.parameters():
            param.data.mul_(2)
        assert not torch.equal(model(batch), before)


def on_replicas(offload: str | None, **options: Any) -> dict[str, Any]:
    found = train(offload=offload, **options)
    found.pop("report")
    return found


@pytest.mark.parametrize(
    ("case", "placement"),
    [("AdamW", "host"), ("clipping", "host"), ("accumulation", "host"), ("recomputation", "host"), ("AdamW", "disk")],
)
def test_replicas_train_as_under_ddp(case: str, placement: str) -> None:
    options = CASES[case]
    expected = run_on_ranks(2, on_replicas, offload=None, **options)
    for found, of_rank in zip(run_on_ranks(2, on_replicas, offload=placement, **options), expected, strict=True):
        if case == "accumulation":  # every micro-batch is averaged, not their sum
            torch.testing.assert_close(found["parameters"], of_rank["parameters"])
        else:
            assert_bit_equal(found, of_rank)


def replicas_on_devices() -> None:
    set_delays(copy_latency=1e-3, kernel_time=1e-4)
    expected = on_replicas(None)
    assert_bit_equal(on_replicas("host"), expected)


def test_replicas_train_as_under_ddp_on_simulated_accelerators() -> None:
    run_on_a_simulated_accelerator(replicas_on_devices, world_size=2)


def test_a_missing_synchronization_shows_on_a_simulated_accelerator() -> None:
    run_on_a_simulated_accelerator(without_synchronization)


def without_synchronization() -> None:
    with delays(copy_latency=0.0, kernel_time=0.0):
        expected = train()
    set_delays(copy_latency=3e-3, kernel_time=1e-4)
    with synchronization_removed():
        found = train(offload="host")
    assert found["losses"] != expected["losses"]


@pytest.mark.parametrize(
    ("setting", "options"),
    [
        ("FSDP", {"fsdp_plugin": FullyShardedDataParallelPlugin()}),
        ("fp16", {"mixed_precision": "fp16"}),
        ("fp8", {"mixed_precision": "fp8"}),
        ("dynamo_backend=EAGER", {"dynamo_backend": "eager"}),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(setting: str, options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedSettingError, match=f"offload.*with.*{setting}"):
        Accelerator(offload="host", **options)


def test_a_model_without_repeated_blocks_is_refused() -> None:
    with pytest.raises(UnsupportedSettingError, match="no repeated blocks"):
        Accelerator(offload="host").prepare(nn.Linear(2, 2))


def test_lbfgs_is_refused() -> None:
    model = Stack(3)
    with pytest.raises(UnsupportedSettingError, match="LBFGS"):
        Accelerator(offload="host").prepare(model, torch.optim.LBFGS(model.parameters()))


def test_a_copy_of_a_prepared_model_does_not_compute_with_the_weights_of_the_original() -> None:
    _, model, _ = prepared()
    with pytest.raises(RuntimeError, match=r"A copy of blocks\.0"):
        copy.deepcopy(model)(torch.ones(2, 4))


def test_the_command_line_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_OFFLOAD_TRAINING", "host")
    assert Accelerator().settings.offload == OffloadConfig(placement="host")


@on_a_simulated_accelerator
def test_a_model_that_is_gone_leaves_nothing_on_a_simulated_accelerator() -> None:
    gc.collect()
    before = torch.accelerator.memory_allocated()
    train(offload="host")
    gc.collect()
    assert torch.accelerator.memory_allocated() == before


def test_training_goes_on_after_a_backward_pass_that_failed() -> None:
    accelerator, model, optimizer = prepared()
    fails = True

    def fail(gradient: Tensor) -> None:
        if fails:
            raise MemoryError("no room")

    def step() -> None:
        hidden = model.blocks[0](model.embedding(torch.ones(2, 4)))
        hidden.register_hook(fail)  # type: ignore[no-untyped-call]
        out = model.head(model.blocks[2](model.blocks[1](hidden)))
        accelerator.backward(out.square().mean())
        optimizer.step()
        optimizer.zero_grad()

    with pytest.raises(MemoryError, match="no room"):
        step()
    optimizer.zero_grad()
    fails = False
    before = model.blocks[0].up.weight.detach().clone()
    step()
    assert not torch.equal(model.blocks[0].up.weight, before)
    assert all(param.grad is None for param in model.parameters())


def test_a_model_without_blocks_is_evaluated_as_it_is() -> None:
    accelerator = Accelerator(offload="host")
    model = accelerator.prepare_model(nn.Linear(2, 2), evaluation_mode=True)
    assert model(torch.ones(1, 2)).shape == (1, 2)
