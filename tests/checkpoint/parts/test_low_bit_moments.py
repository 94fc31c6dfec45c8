"""Optimizers whose moments have a few bits, with the real packages: they resume exactly, or are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import Accelerator, FullyShardedDataParallelPlugin, step_in_backward
from meshwright.checkpoint.commit.engine import CheckpointError
from tests.ranks import ranks

WIDTH = 64
OPTIMIZERS = ["AdamW8bit", "AdamW4bit", "AdamWFp8"]


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """Compute without the compiler, which takes long; torchao compiles every step."""
    pytest.importorskip("torchao.optim")
    with torch.compiler.set_stance("force_eager"):
        yield


def torchao_optimizer(name: str, model: nn.Module) -> Any:
    import torchao.optim

    return getattr(torchao.optim, name)(model.parameters(), lr=0.01)


def bitsandbytes_optimizer(name: str, model: nn.Module) -> Any:
    import bitsandbytes

    return getattr(bitsandbytes.optim, name)(model.parameters(), lr=0.01)


class Run:
    """A model and its optimizer, prepared."""

    def __init__(self, name: str, accelerator: Accelerator | None = None, make: Any = torchao_optimizer) -> None:
        torch.manual_seed(0)
        self.accelerator = accelerator or Accelerator(cpu=True)
        model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
        self.model, self.optimizer = self.accelerator.prepare(model, make(name, model))

    def losses(self, steps: int) -> list[float]:
        seen = []
        for step in range(steps):
            torch.manual_seed(step)
            loss = (self.model(torch.randn(8, WIDTH)) - 1).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    def kinds(self) -> set[str]:
        """Return the classes of the moments, or of their shards."""
        moments = [state["exp_avg"] for state in self.optimizer.state.values()]
        return {type(getattr(moment, "_local_tensor", moment)).__name__ for moment in moments}


@pytest.mark.parametrize("wait", [True, False], ids=["at once", "in the background"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_of_torchao_resume_exactly(name: str, wait: bool, tmp_path: Path) -> None:
    run = Run(name)
    run.losses(2)
    run.accelerator.save_state(tmp_path / "state", wait=wait)
    went_on = run.losses(3)
    run.accelerator.load_state(tmp_path / "state")
    assert run.kinds() == {f"OptimState{name.removeprefix('AdamW')}", "Tensor"}
    assert run.losses(3) == went_on


@ranks(2)
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit"])
def test_sharded_moments_of_torchao_resume_exactly_from_whole_files_only(name: str, tmp_path: Path) -> None:
    with torch.compiler.set_stance("force_eager"):
        for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
            run = Run(name, Accelerator(cpu=True, fsdp_plugin=plugin))
            run.losses(2)
            low_bits = f"OptimState{name.removeprefix('AdamW')}"
            assert low_bits in run.kinds()
            if kind == "SHARDED_STATE_DICT":
                with pytest.raises(CheckpointError, match=rf"SHARDED_STATE_DICT with {low_bits}.*FULL_STATE_DICT"):
                    run.accelerator.save_state(tmp_path / kind)
                continue
            run.accelerator.save_state(tmp_path / kind)
            went_on = run.losses(3)
            run.accelerator.load_state(tmp_path / kind)
            assert low_bits in run.kinds()
            assert run.losses(3) == went_on


@ranks(2)
def test_moments_that_are_whole_numbers_on_one_rank_only_are_refused(tmp_path: Path) -> None:
    """65 rows are 33 and 32: torchao keeps 8 bits only where the number of elements is a multiple of its blocks."""
    with torch.compiler.set_stance("force_eager"):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="FULL_STATE_DICT")
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = nn.Linear(2 * WIDTH, WIDTH + 1)
        model, optimizer = accelerator.prepare(model, torchao_optimizer("AdamW8bit", model))
        accelerator.backward(model(torch.ones(2, 2 * WIDTH)).sum())
        optimizer.step()
        with pytest.raises(CheckpointError, match=r"AdamW8bit.*65 rows over 2 processes"):
            accelerator.save_state(tmp_path / "state")


def test_optimizers_of_torchao_step_in_the_backward_pass() -> None:
    early = Run("AdamW8bit", make=lambda name, model: step_in_backward(torchao_optimizer(name, model)))
    late = Run("AdamW8bit")
    assert early.losses(3) == late.losses(3)
    pairs: list[tuple[Tensor, Tensor]] = list(zip(early.model.parameters(), late.model.parameters(), strict=True))
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit"])
def test_optimizers_of_bitsandbytes_resume_exactly(name: str, tmp_path: Path) -> None:
    run = Run(name, make=bitsandbytes_optimizer)
    run.losses(2)
    moments = [state["state1"] for state in run.optimizer.state.values()]
    assert any(moment.dtype == torch.uint8 for moment in moments)
    run.accelerator.save_state(tmp_path / "state")
    went_on = run.losses(3)
    again = Run(name, make=bitsandbytes_optimizer)
    again.accelerator.load_state(tmp_path / "state")
    assert again.losses(3) == went_on
