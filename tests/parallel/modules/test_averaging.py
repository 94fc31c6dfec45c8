"""Gradients that no engine reduces equal those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import (
    Accelerator,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    ParallelismConfig,
)
from meshwright.parallel.modules.averaging import average_gradients
from tests.ranks import ranks

from ..small_transformer import Transformer, loader, loss_of, model

MICRO_BATCHES = [(inputs, targets) for inputs, targets in loader(8, samples=48)]


def sharded(**options: Any) -> Accelerator:
    """Shard over all processes, or as copies of two; tokens and head are not sharded."""
    plugin = FullyShardedDataParallelPlugin(ignored_modules="tokens|head", **options.pop("fields", {}))
    return Accelerator(cpu=True, fsdp_plugin=plugin, **options)


def hybrid() -> dict[str, Any]:
    return {"parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)}


def mine(accelerator: Accelerator, tensor: Tensor) -> Tensor:
    return tensor.chunk(accelerator.num_processes)[accelerator.process_index]


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer whose steps are as exact as its gradients, also where these are next to nothing."""
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_equal_to_one_process(
    accelerator: Accelerator, net: nn.Module, optimizer: Any, reference: nn.Module, *, clip: float | None = None
) -> None:
    """Train both for three steps, and compare losses, the norm, every gradient and every parameter."""
    steps = accelerator.gradient_accumulation_steps
    by_itself = sgd(reference)
    expected = dict(reference.named_parameters())
    for number, (inputs, targets) in enumerate(MICRO_BATCHES[: 3 * steps], start=1):
        loss = loss_of(reference(inputs), targets)
        (loss / steps).backward()
        with accelerator.accumulate(net):
            own = loss_of(net(mine(accelerator, inputs)), mine(accelerator, targets))
            accelerator.backward(own)
            assert accelerator.reduce(own.detach(), "mean").item() == pytest.approx(loss.item(), abs=1e-5)
            if accelerator.sync_gradients:
                if clip is not None:
                    norm = accelerator.clip_grad_norm_(net.parameters(), clip)
                    assert norm.item() == pytest.approx(
                        nn.utils.clip_grad_norm_(reference.parameters(), clip).item(), abs=1e-5
                    )
                for name, param in net.named_parameters():
                    torch.testing.assert_close(whole(param.grad), expected[name].grad, atol=1e-5, rtol=1e-5)
            optimizer.step()
            optimizer.zero_grad()
        if number % steps == 0:
            by_itself.step()
            by_itself.zero_grad()
    for name, param in net.named_parameters():
        torch.testing.assert_close(whole(param.detach()), expected[name].detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("accumulation", [1, 2])
@ranks(2, 4)
def test_ignored_modules_train_as_on_one_process(accumulation: int, world_size: int) -> None:
    accelerator = sharded(gradient_accumulation_steps=accumulation, **(hybrid() if world_size == 4 else {}))
    net = model()
    net, optimizer = accelerator.prepare(net, sgd(net))
    assert not hasattr(net.head.weight, "device_mesh"), "it is whole"
    assert hasattr(net.norm.weight, "device_mesh")
    assert_equal_to_one_process(accelerator, net, optimizer, model(), clip=0.3)


@ranks(2)
def test_ignored_modules_begin_with_the_values_of_the_first_process() -> None:
    accelerator = sharded()
    net = model()
    if accelerator.process_index:
        with torch.no_grad():
            for module in (net.tokens, net.head):
                module.weight.add_(1.0)
    net, optimizer = accelerator.prepare(net, sgd(net))
    assert_equal_to_one_process(accelerator, net, optimizer, model())


@ranks(4)
def test_the_copies_of_a_sharded_model_begin_equal() -> None:
    accelerator = Accelerator(cpu=True, **hybrid())
    torch.manual_seed(accelerator.process_index)
    net = accelerator.prepare(Transformer())
    for param in net.parameters():
        everywhere = accelerator.gather(whole(param.detach())[None])
        assert all(torch.equal(everywhere[0], other) for other in everywhere)


@pytest.mark.parametrize("on_meta", [False, True])
@ranks(2)
def test_ignored_modules_stay_whole_where_only_the_first_process_brings_weights(on_meta: bool) -> None:
    accelerator = sharded(fields={"cpu_ram_efficient_loading": True})
    net = model()
    if on_meta and accelerator.process_index:
        net = net.to("meta")
    net, optimizer = accelerator.prepare(net, sgd(net))
    assert not hasattr(net.head.weight, "device_mesh")
    assert_equal_to_one_process(accelerator, net, optimizer, model())


@ranks(2)
def test_ignored_modules_of_a_model_without_weights_are_initialised_once_and_stay_whole() -> None:
    accelerator = sharded()
    with torch.device("meta"):
        net = Transformer()
    torch.manual_seed(accelerator.process_index)
    net, optimizer = accelerator.prepare(net, sgd(net))
    assert not hasattr(net.head.weight, "device_mesh")
    reference = Transformer()
    reference.load_state_dict({name: whole(value) for name, value in net.state_dict().items()})
    assert_equal_to_one_process(accelerator, net, optimizer, reference)


@ranks(2)
def test_ignored_modules_that_are_frozen_at_first_are_reduced_once_they_train() -> None:
    accelerator = sharded()
    net = model()
    net.head.requires_grad_(False)
    net = accelerator.prepare(net)
    net.head.requires_grad_(True)
    optimizer = accelerator.prepare(sgd(net))
    assert_equal_to_one_process(accelerator, net, optimizer, model())


class Quantised(nn.Module):
    """A layer whose weight is stored as bytes, and cannot train."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(16, dtype=torch.uint8).reshape(4, 4), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.to(x.dtype) * self.scale


@ranks(2)
def test_ignored_modules_may_be_quantised() -> None:
    plugin = FullyShardedDataParallelPlugin(ignored_modules="1")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 4), Quantised())
    net = accelerator.prepare(copy.deepcopy(reference))
    x = torch.randn(4, 4)
    reference(x).square().mean().backward()
    accelerator.backward(net(mine(accelerator, x)).square().mean())
    torch.testing.assert_close(net[1].scale.grad, reference[1].scale.grad)


@ranks(2)
def test_fp16_scales_and_skips_ignored_modules_with_the_others() -> None:
    scaling = GradScalerKwargs(init_scale=2.0**10)
    accelerator = sharded(mixed_precision="fp16", kwargs_handlers=[scaling])
    net = model()
    net, optimizer = accelerator.prepare(net, sgd(net))
    inputs, targets = MICRO_BATCHES[0]
    reference = model()
    loss_of(reference(inputs), targets).backward()
    for overflows in (False, True):
        before = net.head.weight.detach().clone()
        loss = loss_of(net(mine(accelerator, inputs)), mine(accelerator, targets))
        if overflows and accelerator.process_index:
            loss = loss * float("inf")
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(net.parameters(), 1e9)
        optimizer.step()
        assert optimizer.step_was_skipped == overflows, "on every process"
        assert torch.equal(before, net.head.weight) == overflows
        if not overflows:
            gradient = reference.head.weight.grad
            torch.testing.assert_close(net.head.weight.grad, gradient, atol=1e-4, rtol=2e-2)
            assert norm.item() == pytest.approx(nn.utils.clip_grad_norm_(reference.parameters(), 1e9).item(), rel=1e-2)
        optimizer.zero_grad()
        both = accelerator.gather(net.head.weight.detach()[None])
        assert torch.equal(both[0], both[1])


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@ranks(2)
def test_ignored_modules_are_saved_and_loaded_with_the_others(kind: str, tmp_path: Path) -> None:
    accelerator = sharded(fields={"state_dict_type": kind})
    net = model()
    net, optimizer = accelerator.prepare(net, sgd(net))

    def step() -> float:
        inputs, targets = MICRO_BATCHES[0]
        loss = loss_of(net(mine(accelerator, inputs)), mine(accelerator, targets))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step()
    accelerator.save_state(str(tmp_path))
    onwards = [step(), step()]
    accelerator.load_state(str(tmp_path))
    assert [step(), step()] == onwards


class Chooser(nn.Module):
    """Two layers of which a call uses one, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.layers[which](self.always(x))


@ranks(2)
def test_a_parameter_that_one_process_used_has_half_its_gradient_on_both() -> None:
    rank = Accelerator(cpu=True).process_index
    torch.manual_seed(0)
    net = Chooser()
    alone = copy.deepcopy(net)
    x = torch.randn(2, 4)
    ((alone(x, 0).sum() + alone(x, 1).sum()) / 2).backward()
    net(x, rank).sum().backward()
    average_gradients(net.parameters())
    for (name, param), other in zip(net.named_parameters(), alone.parameters(), strict=True):
        if "layers.2" in name:
            assert param.grad is None
        else:
            torch.testing.assert_close(param.grad, other.grad)


@ranks(2)
def test_sparse_gradients_are_averaged() -> None:
    rank = Accelerator(cpu=True).process_index
    embedding = nn.Embedding(6, 2, sparse=True)
    embedding(torch.tensor([rank, 5])).sum().backward()
    average_gradients(embedding.parameters())
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.to_dense()[:, 0].tolist() == [0.5, 0.5, 0, 0, 0, 1]


class Wide(nn.Module):
    """A model of which one layer is never used."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.unused = nn.Linear(4, 4) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def accumulated(accelerator: Accelerator, net: nn.Module, batch: Tensor) -> None:
    for part in batch:
        with accelerator.accumulate(net):
            accelerator.backward(net(mine(accelerator, part)).square().mean())


def triggered(accelerator: Accelerator, net: nn.Module, batch: Tensor) -> None:
    with accelerator.no_sync(net):
        first, last = (net(mine(accelerator, part)).square().mean() / 2 for part in batch)
        accelerator.backward(first)
    with accelerator.trigger_sync_in_backward(net):
        accelerator.backward(last)


@pytest.mark.parametrize("setting", ["static_graph", "find_unused_parameters"])
@pytest.mark.parametrize("way", [accumulated, triggered])
@ranks(2)
def test_ddp_accumulates_with_every_way_of_knowing_the_graph(
    way: Callable[[Accelerator, nn.Module, Tensor], None], setting: str
) -> None:
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2 if way is accumulated else 1,
        kwargs_handlers=[DistributedDataParallelKwargs(**{setting: True})],
    )
    unused = setting == "find_unused_parameters"
    net, reference = accelerator.prepare(Wide(unused)), Wide(unused)
    optimizer = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=0.1))
    by_itself = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        batch = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(step))
        for part in batch:
            (reference(part).square().mean() / 2).backward()
        way(accelerator, net, batch)
        for param, other in zip(net.parameters(), reference.parameters(), strict=True):
            if other.grad is None:
                assert param.grad is None
            else:
                torch.testing.assert_close(param.grad, other.grad)
        for stepping in (optimizer, by_itself):
            stepping.step()
            stepping.zero_grad()
