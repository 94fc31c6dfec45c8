"""Recomputed blocks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import Accelerator, FullyShardedDataParallelPlugin, recompute_activations
from meshwright.errors import UnsupportedSettingError
from tests.parallel.modules.memory.counting import peak_of
from tests.ranks import ranks

WIDTH = 32
PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


class Block(nn.Module):
    """A block with dropout that counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = torch.tanh(torch.sigmoid(self.up(x)) * 2)
        return x + self.dropout(self.down(hidden))


def stack(num_blocks: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, WIDTH), nn.Sequential(*(Block() for _ in range(num_blocks))))


def gradients(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    model(torch.randn(8, 4)).square().sum().backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


def assert_equal(own: list[Tensor], expected: list[Tensor]) -> None:
    assert len(own) == len(expected)
    assert all(map(torch.equal, own, expected))


@pytest.mark.parametrize("options", [{}, {"offload": True}, {"keep": PRODUCTS}, {"block_classes": ["Block"]}])
def test_gradients_are_equal_to_the_bit_and_blocks_run_twice(options: dict[str, Any]) -> None:
    model = recompute_activations(stack(), **options)
    assert_equal(gradients(model), gradients(stack()))
    assert [block.calls for block in model[1]] == [2] * 6  # type: ignore[index, union-attr]


def test_less_is_kept_and_more_with_products() -> None:
    def peak(model: nn.Module) -> int:
        inputs = torch.randn(2048, 4)
        return peak_of(lambda: model(inputs).sum().backward())

    whole, without_products, plain = (
        peak(recompute_activations(stack(12))),
        peak(recompute_activations(stack(12), keep=PRODUCTS)),
        peak(stack(12)),
    )
    assert whole < plain / 4
    assert whole < without_products < plain


def test_a_copy_recomputes_its_own_blocks() -> None:
    model = recompute_activations(stack())
    other = copy.deepcopy(model)
    gradients(other)
    assert all(param.grad is None for param in model.parameters())


def test_what_recomputes_already_and_what_has_no_blocks_is_refused() -> None:
    with pytest.raises(UnsupportedSettingError, match="recomputed already"):
        recompute_activations(recompute_activations(stack()))
    with pytest.raises(UnsupportedSettingError, match=r"keep=\.\.\., offload=True"):
        recompute_activations(stack(), keep=PRODUCTS, offload=True)
    with pytest.raises(ValueError, match="block_classes"):
        recompute_activations(nn.Linear(2, 2))
    model = stack()
    model.is_gradient_checkpointing = True  # type: ignore[assignment]
    with pytest.raises(UnsupportedSettingError, match="gradient_checkpointing_enable"):
        recompute_activations(model)


@ranks(2)
@pytest.mark.parametrize("sharded", [False, True])
def test_several_processes_recompute_too(sharded: bool) -> None:
    def trained(model: nn.Module) -> list[Tensor]:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if sharded else None
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(2):
            torch.manual_seed(10 * step + accelerator.process_index)
            accelerator.backward(model(torch.randn(8, 4)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return list(accelerator.get_state_dict(model).values())

    assert_equal(trained(recompute_activations(stack())), trained(stack()))


@ranks(2)
def test_fsdp_does_not_recompute_again() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    with pytest.raises(UnsupportedSettingError, match="recomputed already"):
        accelerator.prepare(recompute_activations(stack()))
