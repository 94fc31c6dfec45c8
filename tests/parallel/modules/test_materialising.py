"""Models whose weights only the first process holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, init_empty_weights
from meshwright.errors import UnsupportedSettingError
from tests.ranks import ranks

from ..small_transformer import WIDTH, Transformer, loader, loss_of


class WithBuffers(Transformer):
    """A transformer with a saved and an unsaved buffer, the latter in two places, and an extra state."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(layers=2, tied=True)
        self.register_buffer("scale", torch.linspace(0.5, 2, WIDTH), persistent=False)
        self.blocks[0].register_buffer("scale", self.scale, persistent=False)
        self.register_buffer("calls", torch.full((), 7, dtype=torch.int16))  # which NCCL and gloo do not know
        self.note = "none"

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        return super().forward(tokens, positions) * self.scale.sum() * self.blocks[0].scale.mean()

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, note: str) -> None:
        self.note = note


def first_brings(**fields: Any) -> tuple[Accelerator, WithBuffers]:
    plugin = FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True, **fields)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    with torch.device("meta" if accelerator.process_index else "cpu"):
        net = WithBuffers()
    if accelerator.is_main_process:
        net.note = "of the first"
    return accelerator, net


@pytest.mark.parametrize("offload", [False, True])
@ranks(2)
def test_all_buffers_come_from_the_first_process(offload: bool) -> None:
    accelerator, net = first_brings(cpu_offload=offload)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert torch.equal(net.scale, torch.linspace(0.5, 2, WIDTH))
    assert net.blocks[0].scale is net.scale
    assert net.calls == 7
    assert net.note == "of the first"
    assert net.head.weight is net.tokens.weight
    reference = WithBuffers()
    by_itself = torch.optim.SGD(reference.parameters(), lr=0.1)
    for inputs, targets in loader(8, samples=24):
        expected = loss_of(reference(inputs), targets)
        expected.backward()
        mine = slice(4 * accelerator.process_index, 4 * accelerator.process_index + 4)
        loss = loss_of(net(inputs[mine]), targets[mine])
        accelerator.backward(loss)
        assert accelerator.reduce(loss.detach(), "mean").item() == pytest.approx(expected.item(), abs=1e-4)
        for name, param in net.named_parameters():
            wanted = reference.get_parameter(name).grad
            torch.testing.assert_close(param.grad.full_tensor(), wanted, atol=1e-4, rtol=1e-4)
        for stepping in (optimizer, by_itself):
            stepping.step()
            stepping.zero_grad()


@ranks(2)
def test_weights_that_are_tied_on_the_first_process_only_are_refused() -> None:
    accelerator, net = first_brings()
    if accelerator.process_index:
        net.head.weight = nn.Parameter(net.head.weight.detach())
    with pytest.raises(ValueError, match=r"head\.weight is \(32, 16\) .* on process 0 missing\. .* same weights tied"):
        accelerator.prepare(net)


@ranks(2)
def test_another_model_than_that_of_the_first_process_is_refused() -> None:
    accelerator, net = first_brings()
    if accelerator.process_index:
        net.norm = nn.LayerNorm(WIDTH, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ValueError, match=r"on process 1 .* norm\.weight is \(16,\) of torch\.bfloat16, and on proc"):
        accelerator.prepare(net)


@ranks(4)
def test_weights_of_the_first_process_are_refused_where_layers_are_split() -> None:
    with pytest.raises(UnsupportedSettingError, match=r"cpu_ram_efficient_loading=True with tp_size=2"):
        Accelerator(
            cpu=True,
            fsdp_plugin=FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True),
            parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=2, tp_plan={}),
        )


class Shifted(nn.Linear):
    """A layer with buffers that `reset_parameters` does not set."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("shift", torch.full((4,), 3.0), persistent=False)
        self.register_buffer("count", torch.full((), 3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift * self.count


@pytest.mark.parametrize("unset", ["shift", "count"])
@ranks(2)
def test_a_buffer_that_nobody_initialises_is_refused(unset: str) -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    layer = Shifted()
    layer.weight, layer.bias = (nn.Parameter(param.to("meta")) for param in (layer.weight, layer.bias))
    setattr(layer, unset, getattr(layer, unset).to("meta"))
    with pytest.raises(ValueError, match=rf"A Shifted was made on the meta device, .* no value to its {unset}"):
        accelerator.prepare(nn.Sequential(layer))


@ranks(2)
def test_buffers_that_have_values_keep_them_where_the_weights_have_none() -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    with init_empty_weights(include_buffers=False):
        layer = Shifted()
    assert layer.weight.is_meta
    net = accelerator.prepare(nn.Sequential(layer))
    assert net[0].shift.tolist() == [3.0] * 4
    assert net[0].count == 3
