"""Blocks on disk: training within a memory limit, and going on after a kill."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import Accelerator, OffloadConfig
from tests.parallel.replicas.offload.training import Stack, assert_bit_equal, train
from tests.simulated_accelerator import run_on_a_simulated_accelerator, set_delays
from tests.simulated_accelerator.faults import delays
from tests.tools.plan.test_memory_limit import limited

__all__ = ["limited"]

IMPORT = f"""
import accelerate, torch.distributed.fsdp, torch.distributed.pipelining, {__package__}.program
accelerate.Accelerator(cpu=True, offload="disk")
print(open("/proc/self/status").read().split("RssAnon:")[1].split()[0])
"""
"""Pages of files are not counted: the kernel can read them again."""

CASES: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer": "SGD"},
    "AdamW": {},
    "clipping": {"max_norm": 0.1},
    "accumulation": {"gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_training_from_disk_is_bit_equal_to_training_in_memory(case: str, tmp_path: Path) -> None:
    config = OffloadConfig(placement="disk", folder=tmp_path)
    assert_bit_equal(train(offload=config, **CASES[case]), train(**CASES[case]))
    assert list(tmp_path.iterdir()) == [], "files have no names"


def on_the_device(case: str) -> None:
    set_delays(copy_latency=1e-3, kernel_time=1e-4)
    with delays(copy_latency=0.0, kernel_time=0.0):
        expected = train(**CASES[case])
    assert_bit_equal(train(offload="disk", **CASES[case]), expected)


@pytest.mark.parametrize("case", CASES)
def test_training_from_disk_is_bit_equal_on_a_simulated_accelerator(case: str) -> None:
    run_on_a_simulated_accelerator(on_the_device, case=case)


def test_moments_are_on_disk_also_after_they_were_loaded(tmp_path: Path) -> None:
    accelerator = Accelerator(offload="disk")
    model = Stack(3)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    weight = model.blocks[0].up.weight

    def step() -> int:
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
        return int(optimizer.state[weight]["exp_avg"].data_ptr())

    place = step()
    assert step() == place
    accelerator.save_state(str(tmp_path / "saved"))
    accelerator.load_state(str(tmp_path / "saved"))
    assert optimizer.state[weight]["exp_avg"].data_ptr() == place
    assert step() == place


def run(weights: Path, *words: object, join: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"{__package__}.program", str(weights), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, preexec_fn=join)


def found(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr[-2000:]
    return [line for line in done.stdout.splitlines() if line.startswith("FOUND")]


def saved(folder: Path, blocks: int, width: int) -> Path:
    torch.manual_seed(0)
    torch.save(Stack(blocks, width).state_dict(), folder / "weights.pt")
    return folder / "weights.pt"


def test_a_run_that_was_killed_goes_on_exactly(tmp_path: Path) -> None:
    weights = saved(tmp_path, blocks=4, width=32)
    words = ("--blocks", 4, "--width", 32, "--steps", 6, "--offload", "disk")
    expected = found(run(weights, *words))
    more = ("--save_at", 3, "--folder", tmp_path / "saved")
    assert run(weights, *words, *more, "--killed_at", 5).returncode == -signal.SIGKILL
    assert found(run(weights, *words, *more)) == expected


@pytest.mark.nightly  # four programs start cold, and write gigabytes
def test_a_model_of_four_times_the_memory_trains(tmp_path: Path, limited: Callable[[int], Callable[[], None]]) -> None:
    weights = saved(tmp_path, blocks=96, width=512)
    words = ("--blocks", 96, "--width", 512)
    before = 1024 * int(
        subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout
    )
    limit = before + weights.stat().st_size // 4
    expected = found(run(weights, *words))
    assert found(run(weights, *words, "--offload", "disk", join=limited(limit))) == expected
    assert run(weights, *words, "--offload", "host", join=limited(limit)).returncode == -signal.SIGKILL
