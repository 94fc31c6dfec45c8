"""MLPs in tiles of the sequence."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    recompute_activations,
    step_in_backward,
    tile_mlp,
)
from meshwright.errors import UnsupportedSettingError
from tests.parallel.modules.memory.counting import peak_of
from tests.ranks import ranks

WIDTH = 16


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(width, 8 * width),
            nn.Linear(width, 8 * width),
            nn.Linear(8 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A block around an MLP."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def stack(num_blocks: int = 3, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(num_blocks)))


def gradients(model: nn.Module, tokens: int = 20) -> list[Tensor]:
    torch.manual_seed(1)
    inputs = torch.randn(2, tokens, WIDTH, requires_grad=True)
    outputs = model(inputs)
    outputs.square().mean().backward()
    assert inputs.grad is not None
    return [outputs.detach(), inputs.grad, *(param.grad for param in model.parameters() if param.grad is not None)]


def assert_close(own: list[Tensor], expected: list[Tensor]) -> None:
    assert len(own) == len(expected)
    for one, other in zip(own, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("num_tiles", "tokens"), [(1, 20), (4, 20), (7, 20), (64, 20), (4, 1)])
def test_outputs_and_gradients_are_those_of_whole_sequences(num_tiles: int, tokens: int) -> None:
    model = tile_mlp(stack(), ["Mlp"], num_tiles=num_tiles)
    assert_close(gradients(model, tokens), gradients(stack(), tokens))
    model.eval()
    with torch.no_grad():
        assert_close([model(torch.ones(3, WIDTH))], [stack()(torch.ones(3, WIDTH))])


def test_a_copy_has_its_own_tiles_and_recomputed_blocks_may_have_some() -> None:
    model = tile_mlp(stack(), ["Mlp"], num_tiles=4)
    other = copy.deepcopy(model)
    gradients(other)
    assert all(param.grad is None for param in model.parameters())
    assert_close(gradients(recompute_activations(model)), gradients(stack()))


def test_the_activations_of_a_tile_are_there_at_a_time() -> None:
    def peak(model: nn.Module) -> int:
        inputs = torch.randn(1, 4096, 32)
        return peak_of(lambda: model(inputs).sum().backward())

    whole, tiled = peak(stack(2, 32)), peak(tile_mlp(stack(2, 32), ["Mlp"], num_tiles=16))
    assert tiled < whole / 4


def train(way: str, tiled: bool) -> list[Tensor]:
    options: dict[str, Any] = {}
    if way == "FSDP2":
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, transformer_cls_names_to_wrap=["Block"])
        options["fsdp_plugin"] = plugin
    elif way == "TP":
        plan = {f"{index}.mlp.{name}": "colwise" for index in range(3) for name in ("gate", "up")}
        plan |= {f"{index}.mlp.down": "rowwise" for index in range(3)}
        options["parallelism_config"] = ParallelismConfig(tp_size=2, tp_plan=plan)
    elif way == "blocks on the host":
        options["offload"] = "host"
    accelerator = Accelerator(cpu=True, **options)
    model: nn.Module = tile_mlp(stack(), ["Mlp"], num_tiles=4) if tiled else stack()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if tiled and way in ("FSDP2", "TP"):
        optimizer = step_in_backward(optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(2):
        torch.manual_seed(step if way == "TP" else 10 * step + accelerator.process_index)
        accelerator.backward(model(torch.randn(2, 8, WIDTH)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return list(accelerator.get_state_dict(model).values())


@ranks(2)
@pytest.mark.parametrize("way", ["DDP", "FSDP2", "TP"])
def test_several_processes_train_with_tiles(way: str) -> None:
    assert_close(train(way, tiled=True), train(way, tiled=False))


def test_offloaded_blocks_train_with_tiles() -> None:
    assert_close(train("blocks on the host", tiled=True), train("one process", tiled=False))


class Mixing(nn.Module):
    """A module in which tokens see others."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def test_modules_that_mix_tokens_or_take_more_than_tokens_are_refused() -> None:
    with pytest.raises(UnsupportedSettingError, match="depends on other tokens"):
        gradients(tile_mlp(nn.Sequential(Mixing()), ["Mixing"], num_tiles=2))
    with pytest.raises(UnsupportedSettingError, match="batch norm"):
        tile_mlp(nn.Sequential(nn.BatchNorm1d(4)), ["Sequential"], num_tiles=2)
    with pytest.raises(UnsupportedSettingError, match="in tiles already"):
        tile_mlp(tile_mlp(stack(), ["Mlp"], num_tiles=2), ["Mlp"], num_tiles=2)
    with pytest.raises(UnsupportedSettingError, match="other arguments than one tensor"):
        tile_mlp(Mlp(), ["Mlp"], num_tiles=2)(torch.ones(4, WIDTH), torch.ones(1))
    with pytest.raises(ValueError, match=r"no module of the classes \['Other'\]"):
        tile_mlp(stack(), ["Other"], num_tiles=2)
    with pytest.raises(ValueError, match="num_tiles=0"):
        tile_mlp(stack(), ["Mlp"], num_tiles=0)
