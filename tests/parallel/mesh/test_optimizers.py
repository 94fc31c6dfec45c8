"""Every optimizer equals one process, or is refused at `prepare` with the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from meshwright.errors import UnsupportedSettingError
from tests.ranks import ranks

from .optimizers import COMPILING, IN_CLOSURES, REFUSED, RIGHT, Maker

PLAN = {"up": "colwise", "down": "rowwise"}
STEPS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))) * self.scale


def train(accelerator: Accelerator | None, make: Maker, *, in_closure: bool) -> list[Tensor]:
    """Train, on whole batches without an Accelerator; return the parameters."""
    net: Any = Net().double()
    optimizer: Any = make(net)
    params = list(net.parameters())
    if accelerator is not None:
        net, optimizer = accelerator.prepare(net, optimizer)
        params = list(accelerator.unwrap_model(net).parameters())
    for step in range(STEPS):
        data = torch.randn(8, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        if accelerator is not None:
            strategy = accelerator.strategy
            data = data.chunk(strategy.num_data_ranks)[strategy.data_rank]

        def closure(data: Tensor = data) -> Tensor:
            optimizer.zero_grad()
            loss = (net(data[:, :6]) - data[:, 6:]).square().mean()
            if accelerator is None:
                loss.backward()
                return loss.detach()
            accelerator.backward(loss)
            return accelerator.reduce(loss.detach(), "mean")

        if in_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return [param.full_tensor() if hasattr(param, "full_tensor") else param for param in map(Tensor.detach, params)]


def off_by(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def compare(accelerator: Accelerator, spreads: bool, right: dict[str, Maker] = RIGHT) -> None:
    """Compare every optimizer with one process, and name all that differ."""
    wrong = []
    refused = {name: make for name, (make, _) in REFUSED.items()} if right is RIGHT else {}
    for name, make in {**right, **refused}.items():
        remedy = REFUSED[name][1] if spreads and name in REFUSED else None
        try:
            found, expected = (train(each, make, in_closure=name in IN_CLOSURES) for each in (accelerator, None))
            difference = off_by(found, expected)
            if remedy is not None or not difference < (1e-6 if right is COMPILING else 1e-9):
                wrong.append(f"{name}: off by {difference:.1e}")
        except UnsupportedSettingError as error:
            if remedy is None or remedy not in error.remedy:
                wrong.append(f"{name}: {error}")
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__} {error}"[:200])
        accelerator.free_memory()
    assert not wrong, "\n".join(wrong)


@ranks(2)
def test_replicas_step_as_one_process() -> None:
    compare(Accelerator(cpu=True), spreads=False)


@ranks(2)
def test_shards_step_as_one_process_or_are_refused() -> None:
    compare(Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin()), spreads=True)


@ranks(2)
def test_split_layers_step_as_one_process_or_are_refused() -> None:
    compare(Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2, tp_plan=PLAN)), spreads=True)


@ranks(4)
def test_sharded_split_layers_step_as_one_process_or_are_refused() -> None:
    mesh = ParallelismConfig(dp_shard_size=2, tp_size=2, tp_plan=PLAN)
    compare(Accelerator(cpu=True, parallelism_config=mesh), spreads=True)


def clipped(accelerator: Accelerator) -> None:
    """Compare gradients that were cut by value with those of one process."""
    plain, net = Net().double(), Net().double()
    data = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain(data).square().mean().backward()
    torch.nn.utils.clip_grad_value_(plain.parameters(), 0.05)
    net = accelerator.prepare(net)
    strategy = accelerator.strategy
    accelerator.backward(net(data.chunk(strategy.num_data_ranks)[strategy.data_rank]).square().mean())
    accelerator.clip_grad_value_(net.parameters(), 0.05)
    for param, expected in zip(net.parameters(), plain.parameters(), strict=True):
        gradient: Any = param.grad
        found = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        torch.testing.assert_close(found, expected.grad)


@ranks(2)
def test_gradients_of_split_and_whole_layers_are_cut_by_value() -> None:
    clipped(Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2, tp_plan=PLAN)))


@ranks(4)
def test_gradients_of_sharded_and_split_layers_are_cut_by_value() -> None:
    clipped(Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=2, tp_plan=PLAN)))


@pytest.mark.nightly
@ranks(2, time_limit=600.0)
def test_an_optimizer_of_8_bits_steps_as_one_process() -> None:
    compare(Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin()), spreads=True, right=COMPILING)
