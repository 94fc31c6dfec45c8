"""What an estimate says of a lever is what real training takes, on a simulated device or by the optimizer itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import Accelerator, recompute_activations, step_in_backward
from meshwright.inference.estimating.batches import ModelArguments
from meshwright.tools.estimate.estimate import estimate
from meshwright.tools.estimate.levers import (
    EIGHT_BITS,
    HOST_INPUTS,
    IN_BACKWARD,
    LEVERS,
    LINEAR_LOSS,
    RECOMPUTE,
    STREAMED,
    EightBitAdam,
)
from meshwright.tools.estimate.program import Program
from tests.simulated_accelerator import run_on_a_simulated_accelerator
from tests.simulated_accelerator.faults import moves_in_place

WIDTH, TOKENS, BLOCKS = 128, 512, 4


class Block(nn.Module):
    """A feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    """Blocks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def peak_of_training(lever: str | None) -> int:
    """Train on the simulated device with a lever, as a script does; return the bytes of its peak."""
    accelerator = Accelerator(offload="host" if lever == STREAMED else None)
    model: Any = Model()
    if lever in (RECOMPUTE, HOST_INPUTS):
        recompute_activations(model, offload=lever == HOST_INPUTS)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    if lever == IN_BACKWARD:
        step_in_backward(optimizer)
    with moves_in_place():
        model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(3):
        if step == 1:
            torch.gpu.synchronize()
            torch.accelerator.reset_peak_memory_stats()
        batch = torch.ones(TOKENS, WIDTH).to(accelerator.device)
        outputs = model(batch)
        accelerator.backward(outputs.float().mean())
        del batch, outputs
        optimizer.step()
        optimizer.zero_grad()
    torch.gpu.synchronize()
    return torch.accelerator.max_memory_allocated()


def test_savings_are_those_of_real_training_on_a_simulated_accelerator() -> None:
    found = estimate(Model(), "float32", batch=ModelArguments.of(torch.zeros(TOKENS, WIDTH)), levers=True)
    assert found.training is not None
    levers = {lever.name: lever for lever in found.levers}
    assert list(levers) == [lever.name for lever in LEVERS]
    assert levers[LINEAR_LOSS].objection == "it is for language models that get labels"
    assert levers[EIGHT_BITS].saves > 0
    without = run_on_a_simulated_accelerator(peak_of_training, lever=None)[0]
    assert found.training.total == pytest.approx(without, rel=0.01)
    for name in (RECOMPUTE, HOST_INPUTS, IN_BACKWARD, STREAMED):
        [real] = run_on_a_simulated_accelerator(peak_of_training, lever=name)
        assert levers[name].saves == pytest.approx(without - real, rel=0.01), name


def test_the_state_of_8_bit_moments_is_that_of_bitsandbytes() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    sizes = []
    for kind in (bitsandbytes.optim.AdamW8bit, EightBitAdam):
        model = nn.Sequential(nn.Linear(64, 100), nn.Linear(100, 7))
        optimizer = kind(model.parameters())
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        names = ("state1", "state2", "absmax1", "absmax2")
        sizes.append([sum(state[name].nbytes for name in names if name in state) for state in optimizer.state.values()])
    assert sizes[0] == sizes[1]


def test_a_lever_that_is_not_possible_says_why() -> None:
    program = Program(
        model=Model(), batch=ModelArguments.of(torch.zeros(8, WIDTH)), stored_in=torch.float32, processes=2
    )
    for fsdp, impossible in ((False, [LINEAR_LOSS, IN_BACKWARD]), (True, [LINEAR_LOSS, EIGHT_BITS, STREAMED])):
        spread = replace(program, fsdp=fsdp)
        assert [lever.name for lever in LEVERS if lever.objection(spread) is not None] == impossible
