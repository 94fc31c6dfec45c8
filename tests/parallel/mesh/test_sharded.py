"""Every parallelism strategy trains a model as one process does."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import Accelerator, FullyShardedDataParallelPlugin
from tests.ranks import ranks
from tests.sizes import cases

from ..small_transformer import WIDTH, Transformer, loader, loss_of
from ..ways import WAYS, train

SPREAD = [way for way, (size, _) in WAYS.items() if size > 1]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulating": {"accumulation": 4, "clip": 0.5},
    "tied": {"tied": True},
}


@cache
def alone(variant: str) -> list[float]:
    [losses] = train("one", **VARIANTS[variant])
    return losses


@pytest.mark.parametrize(
    ("way", "variant"),
    cases(
        gate=[(way, variant) for way in SPREAD for variant in ("accumulating", "plain" if "pp" in way else "tied")],
        nightly=product(SPREAD, VARIANTS),
    ),
)
def test_the_loss_is_that_of_one_process(way: str, variant: str) -> None:
    if variant == "tied" and "pp" in way:
        pytest.skip("a weight of two stages is refused: see test_pipeline.py")
    per_rank = train(way, **VARIANTS[variant])
    for losses in per_rank:
        assert losses == pytest.approx(alone(variant), abs=1e-5)


class WithBuffer(Transformer):
    """A transformer that adds a buffer in fp32 to what it computes between its units."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.between = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        places = self.positions(torch.arange(tokens.shape[1]))
        x = self.between(self.tokens(tokens) + places + self.shift)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) + self.shift)


@pytest.mark.parametrize("ignored", [None, "head"])
@ranks(2)
def test_bf16_takes_a_buffer_in_fp32_and_a_whole_module_as_ddp_does(ignored: str | None) -> None:
    losses = []
    for options in ({}, {"fsdp_plugin": FullyShardedDataParallelPlugin(ignored_modules=ignored)}):
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", **options)
        net = WithBuffer()
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for inputs, targets in list(loader(8))[:3]:
            mine = slice(4 * accelerator.process_index, 4 * accelerator.process_index + 4)
            logits = net(inputs[mine])
            assert logits.dtype == torch.float32
            loss = loss_of(logits, targets[mine])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    assert losses[3:] == pytest.approx(losses[:3], abs=1e-2)
