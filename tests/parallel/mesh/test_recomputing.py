"""Activation checkpointing: units save only their inputs and recompute the rest."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import Accelerator, FullyShardedDataParallelPlugin, TorchDynamoPlugin
from meshwright.parallel.mesh.sharded import CheckpointedForward
from tests.ranks import ranks

UNITS, BATCH, WIDTH = 3, 64, 16
INPUTS_OF_UNITS = UNITS * BATCH * WIDTH * 4


class Unit(nn.Module):
    """A unit with activations much larger than its input, that counts its forward passes."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16 * WIDTH), nn.Linear(16 * WIDTH, WIDTH)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        Unit.calls += 1
        return x + self.down(torch.tanh(torch.tanh(self.up(x)))) * mask


class Net(nn.Module):
    """Units that are called with their input in its place, or by its name."""

    def __init__(self, by_name: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.by_name = by_name
        self.first = nn.Linear(WIDTH, WIDTH)
        self.units = nn.ModuleList(Unit() for _ in range(UNITS))

    def forward(self, x: Tensor) -> Tensor:
        x, mask = self.first(x), (x > 0).float()
        for unit in self.units:
            x = unit(x=x, mask=mask) if self.by_name else unit(x, mask=mask)
        return x


class CountingSaveOnCpu(torch.autograd.graph.save_on_cpu):
    """torch's own, that counts the bytes which go to the host."""

    taken = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        pack: Callable[[Tensor], Any] = self.pack_hook

        def counting(tensor: Tensor) -> Any:
            CountingSaveOnCpu.taken += tensor.nbytes
            return pack(tensor)

        self.pack_hook = counting


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("offload", [False, True])
@ranks(2)
def test_every_unit_runs_twice_and_only_its_input_goes_to_the_host(offload: bool, by_name: bool) -> None:
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    plain = Net()
    plain(x).square().mean().backward()
    plugin = FullyShardedDataParallelPlugin(
        activation_checkpointing=True, activation_checkpointing_offload=offload, transformer_cls_names_to_wrap=["Unit"]
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    net = accelerator.prepare(Net(by_name))
    Unit.calls = CountingSaveOnCpu.taken = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd.graph, "save_on_cpu", CountingSaveOnCpu)
        loss = net(x).square().mean()
        assert Unit.calls == UNITS
        accelerator.backward(loss)
    assert Unit.calls == 2 * UNITS
    assert CountingSaveOnCpu.taken == (INPUTS_OF_UNITS if offload else 0)
    for name, param in net.named_parameters():
        torch.testing.assert_close(param.grad.full_tensor(), plain.get_parameter(name).grad)


@pytest.mark.parametrize("regional", [False, True])
@pytest.mark.parametrize("offload", [False, True])
@ranks(2)
def test_recomputation_and_compilation_go_together(offload: bool, regional: bool) -> None:
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    plain = Net()
    plain(x).square().mean().backward()
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(
            activation_checkpointing=True,
            activation_checkpointing_offload=offload,
            transformer_cls_names_to_wrap=["Unit"],
        ),
        dynamo_plugin=TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional),
    )
    net = accelerator.prepare(Net())
    accelerator.backward(net(x).square().mean())
    for name, param in accelerator.unwrap_model(net, keep_torch_compile=False).named_parameters():
        torch.testing.assert_close(param.grad.full_tensor(), plain.get_parameter(name).grad)
    torch._dynamo.reset()


@pytest.mark.parametrize("by_name", [False, True])
def test_an_offloaded_input_does_not_stay_on_the_device(by_name: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the backward pass needs is on the host then: nothing else may hold the input until it comes."""

    class CopyingSaveOnCpu(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool = False) -> None:
            super().__init__(torch.clone, torch.clone)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", CopyingSaveOnCpu)
    unit, mask = Unit(), torch.ones(BATCH, WIDTH)
    forward = CheckpointedForward(unit.forward, offload=True)
    x = torch.ones(BATCH, WIDTH, requires_grad=True) * 2
    held = weakref.ref(x)
    output = forward(x=x, mask=mask) if by_name else forward(x, mask=mask)
    del x
    assert held() is None
    output.sum().backward()
    assert unit.up.weight.grad is not None
