"""Hooks on gradients run however parameters are spread; gradients of gradients are right or refused."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from meshwright.errors import UnsupportedSettingError
from tests.ranks import ranks

WAYS: dict[str, Any] = {
    "ddp": dict,
    "fsdp2": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin()},
    "tp": lambda: {
        "parallelism_config": ParallelismConfig(tp_size=2, tp_plan={"*.up": "colwise", "*.down": "rowwise"})
    },
    "mesh": lambda: {
        "parallelism_config": ParallelismConfig(
            dp_shard_size=2, tp_size=2, tp_plan={"*.up": "colwise", "*.down": "rowwise"}
        )
    },
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(Block(), Block())
        self.double()


def masked(gradient: Tensor) -> Tensor:
    return gradient * torch.arange(gradient.numel(), dtype=gradient.dtype).view(gradient.shape)


def tripled(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(3)


def add_hooks(net: Any) -> list[Any]:
    handles = [layer.weight.register_hook(masked) for block in net for layer in (block.up, block.down)]
    handles.append(net[0].down.weight.register_post_accumulate_grad_hook(tripled))
    net[1].up.weight.register_hook(lambda gradient: gradient.mul(100)).remove()
    return handles


def train(accelerator: Accelerator | None, hooks: str) -> list[Tensor]:
    net: Any = Net()
    handles = add_hooks(net) if hooks != "after" or accelerator is None else []
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    plain = net
    if accelerator is not None:
        net, optimizer = accelerator.prepare(net, optimizer)
        plain = accelerator.unwrap_model(net)
    if hooks == "after" and accelerator is not None:
        handles = add_hooks(plain)
    for step in range(3):
        data = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        if accelerator is not None:
            data = data.chunk(accelerator.strategy.num_data_ranks)[accelerator.strategy.data_rank]
        loss = net(data).square().mean()
        accelerator.backward(loss) if accelerator is not None else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            for handle in handles:
                handle.remove()
    if accelerator is not None:
        accelerator.free_memory()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in map(Tensor.detach, plain.parameters())]


def compare(way: str, *hooks: str) -> None:
    accelerator = Accelerator(cpu=True, **WAYS[way]())
    for when in hooks:
        for one, other in zip(train(accelerator, when), train(None, when), strict=True):
            assert float((one - other).abs().max()) < 1e-12, (way, when)


@ranks(2)
def test_hooks_from_before_and_after_prepare_run_until_they_are_removed() -> None:
    compare("ddp", "before", "after")


@ranks(2)
def test_hooks_of_sharded_parameters_run_on_the_gathered_ones() -> None:
    compare("fsdp2", "before", "after")


@ranks(2)
def test_hooks_of_split_parameters_are_given_whole_gradients() -> None:
    compare("tp", "before")


@ranks(4)
def test_hooks_of_sharded_and_split_parameters_run() -> None:
    compare("mesh", "before")


@ranks(2)
def test_a_sharded_parameter_with_hooks_is_pickled() -> None:
    net: Any = Accelerator(cpu=True, **WAYS["fsdp2"]()).prepare(Net())
    net[0].up.weight.register_hook(masked)
    pickle.dumps({name: param.detach() for name, param in net.named_parameters()})


def penalty(net: Any, data: Tensor) -> Tensor:
    inputs = data.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(net(inputs).square().sum(), inputs, create_graph=True)
    return gradient.square().mean()


@pytest.mark.parametrize("way", ["fsdp2", "tp"])
@ranks(2)
def test_gradients_of_gradients_are_refused(way: str) -> None:
    accelerator = Accelerator(cpu=True, **WAYS[way]())
    net: Any = accelerator.prepare(Net())
    with pytest.raises(UnsupportedSettingError, match=r"create_graph=True.*DDP"):
        penalty(net, torch.ones(2, 4, dtype=torch.float64))
    accelerator.backward(net(torch.ones(2, 4, dtype=torch.float64)).sum())


@ranks(2)
def test_gradients_of_gradients_of_copies_are_those_of_one_process() -> None:
    accelerator = Accelerator(cpu=True)
    plain, data = Net(), torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    net = accelerator.prepare(Net())
    penalty(plain, data).backward()
    accelerator.backward(penalty(net, data.chunk(2)[accelerator.process_index]))
    for one, other in zip(accelerator.unwrap_model(net).parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
