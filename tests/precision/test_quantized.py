"""Frozen quantised weights under FSDP2, with the real packages: right values, or a refusal by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from meshwright import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from meshwright.errors import UnsupportedSettingError
from tests.ranks import ranks

WIDTH = 64


class Adapted(nn.Module):
    """A frozen linear layer, and two small ones that are trained."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def four_bits(storage: torch.dtype = torch.uint8, seed: int = 0, quantises: bool = True) -> nn.Module:
    """Return a model with 4-bit layers of bitsandbytes."""
    import bitsandbytes

    torch.manual_seed(seed)
    layers = []
    for _ in range(3):
        layer = bitsandbytes.nn.Linear4bit(
            WIDTH, WIDTH, compute_dtype=torch.float32, quant_type="nf4", quant_storage=storage
        )
        layer.bias.requires_grad_(False)
        layers.append(Adapted(layer.to("cpu") if quantises else layer))
    return nn.Sequential(*layers)


def torchao_bits() -> nn.Module:
    """Return a model with layers of torchao in 4 bits."""
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted(nn.Linear(WIDTH, WIDTH).requires_grad_(False)) for _ in range(3)))
    config = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))
    quantize_(model, config, lambda module, name: name.endswith("base"))
    return model


def torchao_nf4() -> nn.Module:
    """Return a model with layers of torchao in NF4, whose tensors bring their own sharding."""
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

    class Linear(nn.Linear):
        """A frozen layer."""

        def forward(self, x: Tensor) -> Tensor:
            return linear_nf4(x, self.weight)

    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted(Linear(WIDTH, WIDTH, bias=False)) for _ in range(3)))
    for layer in model:
        weight = to_nf4(layer.base.weight.detach(), block_size=64, scaler_block_size=8)  # type: ignore[union-attr]
        layer.base.weight = nn.Parameter(weight, requires_grad=False)  # type: ignore[union-attr]
    return model


def sharding(**options: Any) -> Accelerator:
    """Return an accelerator that shards."""
    mixed_precision = options.pop("mixed_precision", None)
    plugin = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Adapted"], **options)
    return Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision=mixed_precision)


def batch() -> Tensor:
    """Return the inputs, the same on every rank, so that means over ranks are those of one process."""
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))


def losses_of(model: Any, steps: int, backward: Any = Tensor.backward) -> Iterator[float]:
    """Train the adapters."""
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=1.0)
    for _ in range(steps):
        loss = (model(batch()).float() - 1).square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        yield float(loss.detach())


@pytest.mark.parametrize("quantises", [True, False])
@pytest.mark.parametrize("from_first", [True, False])
@ranks(2)
def test_4_bit_weights_are_sharded_and_train_as_on_one_process(from_first: bool, quantises: bool) -> None:
    alone = list(losses_of(four_bits(), 4))
    accelerator = sharding(cpu_ram_efficient_loading=from_first)
    model = accelerator.prepare(four_bits(quantises=quantises))
    packed = model[0].base.weight
    assert packed.to_local().nbytes * 2 == packed.numel() == WIDTH * WIDTH // 2
    assert list(losses_of(model, 4, accelerator.backward)) == pytest.approx(alone, abs=1e-6)
    assert alone[-1] < alone[0]


@pytest.mark.parametrize("storage", [torch.uint8, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mixed_precision", ["bf16", "fp16"])
@ranks(2)
def test_packed_bytes_are_never_converted_like_numbers(mixed_precision: str, storage: torch.dtype) -> None:
    """Bytes in bf16 that are gathered as fp16 have the right size, and other values."""
    with torch.no_grad():
        expected = four_bits()(batch())
        model = sharding(mixed_precision=mixed_precision).prepare(four_bits(storage))
        torch.testing.assert_close(model(batch()).float(), expected, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("make", [four_bits, torchao_bits, torchao_nf4])
@ranks(2)
def test_a_saved_state_has_the_scales_and_resumes_exactly(make: Any, tmp_path: Path) -> None:
    whole = make().state_dict()
    accelerator = sharding(state_dict_type="FULL_STATE_DICT")
    model = accelerator.prepare(make())
    list(losses_of(model, 2, accelerator.backward))
    accelerator.save_state(tmp_path / "state")
    full = accelerator.get_state_dict(model)
    if accelerator.is_main_process and make is four_bits:
        assert full.keys() == whole.keys()
        for name in (name for name in whole if ".base." in name):
            assert torch.equal(full[name], whole[name]), name
    went_on = list(losses_of(model, 2, accelerator.backward))
    accelerator.load_state(tmp_path / "state")
    assert list(losses_of(model, 2, accelerator.backward)) == went_on


@pytest.mark.parametrize("make", [four_bits, torchao_bits, torchao_nf4])
def test_a_state_resumes_on_one_process(make: Any, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(make())
    list(losses_of(model, 2))
    accelerator.save_state(tmp_path / "state")
    went_on = list(losses_of(model, 2))
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.endswith(("absmax", "scale")):
                value.zero_()
    accelerator.load_state(tmp_path / "state")
    assert list(losses_of(model, 2)) == went_on


@pytest.mark.parametrize(("make", "kind"), [(torchao_bits, "IntxUnpackedToInt8Tensor"), (torchao_nf4, "NF4Tensor")])
@ranks(2)
def test_weights_of_torchao_stay_whole_and_train_as_on_one_process(make: Any, kind: str) -> None:
    alone = list(losses_of(make(), 4))
    accelerator = sharding(cpu_ram_efficient_loading=True)
    model = accelerator.prepare(make())
    assert type(model[0].base.weight.data).__name__ == kind
    assert list(losses_of(model, 4, accelerator.backward)) == pytest.approx(alone, abs=1e-6)


@ranks(2)
def test_what_would_give_wrong_values_is_refused() -> None:
    accelerator = sharding()
    with pytest.raises(ValueError, match=r"0\.base\.weight is quantised from other values on other processes"):
        accelerator.prepare(four_bits(seed=accelerator.process_index))
    with pytest.raises(UnsupportedSettingError, match=r"meta device.*Load and quantise the model on every process"):
        accelerator.prepare(torchao_bits().to("meta"))
    lost = four_bits()
    for layer in lost:
        layer.base.quant_state = None
    fully_shard(lost)
    with pytest.raises(ValueError, match=r"0\.base\.weight is sharded and has no scales"):
        accelerator.prepare(lost)


@ranks(2)
def test_quantised_layers_are_not_split() -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    with pytest.raises(
        UnsupportedSettingError, match=r"tp=2.* with quantised weights \(0\.base\.weight is bitsandbytes"
    ):
        accelerator.prepare(four_bits())
