"""Estimates against what is really allocated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from accelerate import Accelerator
from accelerate.inference.estimating.estimate import (
    FORMATS,
    Batch,
    Spread,
    blocks_of,
    estimate,
    forward_peak,
    saved_for_backward,
)
from tests.parallel.small_transformer import LENGTH, Transformer, loss_of
from tests.ranks import run_on_ranks

TOKENS = torch.randint(0, 32, (4, LENGTH), generator=torch.Generator().manual_seed(0))
BATCH = Batch(args=(TOKENS,))


def bytes_of(tensors: Any) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def weights_of(model: nn.Module) -> int:
    return bytes_of([*model.parameters(), *model.buffers()])


def loss(outputs: Tensor, batch: Batch) -> Tensor:
    return loss_of(outputs, batch.args[0])


def on_meta(make: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = make()
    return model


class Convolutions(nn.Module):
    """Buffers of two dtypes, a parameter outside of all modules, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(8, 5)
        self.register_buffer("table", torch.ones(7), persistent=False)
        self.body[0].requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(images).mean((2, 3))) * self.scale
        return outputs


MODELS = {
    "transformer": Transformer,
    "tied": lambda: Transformer(tied=True),
    "convolutions": Convolutions,
    "torch's encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2),
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_exact(name: str, dtype: str) -> None:
    real = MODELS[name]().to(getattr(torch, dtype))  # type: ignore[no-untyped-call]
    assert estimate(on_meta(MODELS[name]), dtype).inference.weights == weights_of(real)


@pytest.mark.parametrize("name", ["transformer", "tied", "convolutions"])
@pytest.mark.parametrize(("dtype", "pure"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_what_a_training_step_keeps_is_exact(name: str, dtype: str, pure: bool) -> None:
    """One real step under autocast, as an Accelerator makes it, or in bf16 alone."""
    model = MODELS[name]()  # type: ignore[no-untyped-call]
    inputs = TOKENS if name != "convolutions" else torch.randn(2, 3, 8, 8)
    if pure:
        model = model.to(torch.bfloat16)
        inputs = inputs.to(torch.bfloat16) if inputs.is_floating_point() else inputs
    optimizer = torch.optim.AdamW(model.parameters())
    if not pure:
        accelerator = Accelerator(mixed_precision="bf16" if dtype == "bfloat16" else "no", cpu=True)
        model = accelerator.prepare(model)
    model(inputs).float().sum().backward()
    optimizer.step()

    found = estimate(on_meta(MODELS[name]), dtype, pure=pure).training
    assert found is not None
    assert found.weights == weights_of(model)
    assert found.gradients == bytes_of(param.grad for param in model.parameters() if param.grad is not None)
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    assert found.optimizer == bytes_of(state)
    assert found.total == found.weights + found.gradients + found.optimizer


def really_saved(model: nn.Module, inputs: Tensor, autocast: torch.dtype | None) -> int:
    """Count what autograd keeps of a real forward pass and loss."""
    own = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        start = tensor.untyped_storage().data_ptr()
        if start not in own:
            kept.setdefault(start, tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            outputs = model(inputs)
        result = loss_of(outputs.float(), inputs)
    del result
    return bytes_of(kept.values())


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_activations_are_what_autograd_keeps(autocast: torch.dtype | None, tied: bool, batch_size: int) -> None:
    tokens = torch.zeros(batch_size, LENGTH, dtype=torch.long)
    batch = Batch(args=(tokens.to("meta"),))
    real = really_saved(Transformer(tied=tied), tokens, autocast)
    model = on_meta(lambda: Transformer(tied=tied))
    saved, copies = saved_for_backward(model, batch, loss=loss, autocast=autocast)
    assert saved + copies == pytest.approx(real, rel=0.1)
    assert (copies > 0) == (autocast is not None)


def test_copies_by_autocast_do_not_grow_with_the_batch() -> None:
    model = on_meta(Transformer)

    def measured(size: int) -> tuple[int, int]:
        tokens = torch.zeros(size, LENGTH, dtype=torch.long, device="meta")
        return saved_for_backward(model, Batch.of(tokens), loss=loss, autocast=torch.bfloat16)

    (small, copies), (large, same) = measured(1), measured(8)
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    biases = sum(m.bias.numel() for m in model.modules() if isinstance(m, nn.Linear) and m.bias is not None)
    assert copies == same
    assert 2 * linear <= copies <= 2 * (linear + biases)
    assert large > 7 * small


def test_the_forward_pass_is_what_a_profiler_sees() -> None:
    """The CPU allocator's own account: the sum of all that was asked for and given back, at its highest."""
    model, tokens = Transformer(layers=3).eval(), torch.zeros(64, LENGTH, dtype=torch.long)
    with torch.no_grad():
        model(tokens)
        with torch.profiler.profile(profile_memory=True) as profile:
            model(tokens)
    now = peak = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    estimated = forward_peak(on_meta(lambda: Transformer(layers=3)), Batch.of(tokens)) - bytes_of([tokens])
    assert estimated == pytest.approx(peak, rel=0.1)


def test_a_model_is_left_as_it_was() -> None:
    model = Transformer().eval()
    model.norm.train()
    before = {name: (id(param), param.clone()) for name, param in model.named_parameters()}
    modes = [module.training for module in model.modules()]
    for dtype in FORMATS:
        estimate(model, dtype, batch=BATCH, loss=loss)
    assert [module.training for module in model.modules()] == modes
    for name, param in model.named_parameters():
        assert id(param) == before[name][0]
        assert torch.equal(param, before[name][1])
        assert param.grad is None


def test_what_does_not_run_without_numbers_is_left_out_with_the_reason() -> None:
    class Looks(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) if input.sum() > 0 else input

    found = estimate(on_meta(lambda: Looks(4, 4)), "float32", batch=Batch.of(torch.ones(2, 4)))
    assert found.left_out is not None
    assert "did not run without numbers" in found.left_out
    assert found.inference.forward is None
    assert found.training is not None
    assert found.training.activations is None
    assert found.training.total == 4 * 20 * 4 + 2 * 4


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="choose one of float32"):
        estimate(nn.Linear(2, 2), "int2")


def test_the_largest_layer_is_a_block_or_what_is_outside_of_them() -> None:
    found = estimate(on_meta(Transformer), "float32")
    assert found.largest_layer_name == "blocks.0"
    assert found.largest_layer == weights_of(Transformer().blocks[0])
    wide = nn.Sequential(nn.Embedding(1000, 4), nn.Linear(4, 4))
    assert estimate(wide, "float16").largest_layer_name == "0"
    assert estimate(wide, "float16").largest_layer == 8000
    assert estimate(nn.Linear(2, 3, bias=False), "float32").largest_layer == 24


def test_blocks_may_be_named_by_the_model_and_need_not_exist() -> None:
    model = Transformer(layers=3)
    assert blocks_of(model) == list(model.blocks)
    model._no_split_modules = ["Linear"]  # type: ignore[assignment]
    assert all(isinstance(block, nn.Linear) for block in blocks_of(model))
    model._no_split_modules = ["Elsewhere"]  # type: ignore[assignment]
    assert blocks_of(model) == list(model.blocks)


# --- Several processes ------------------------------------------------------------------------------------------------


def test_copies_on_several_processes_have_buckets() -> None:
    one = estimate(on_meta(Transformer), "float32").training
    two = estimate(on_meta(Transformer), "float32", spread=Spread(processes=2)).training
    assert one is not None
    assert two is not None
    assert two.communication == two.gradients == one.gradients
    assert two.total == one.total + one.gradients


def test_shards_are_equal_parts_padded() -> None:
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 3, bias=False))
    found = estimate(model, "float32", spread=Spread(processes=2, fsdp=True)).training
    assert found is not None
    assert found.weights == 4 * (3 * 4 + 2 * 5)  # rows: 3 of 5, 2 of 3
    assert found.optimizer == 2 * found.gradients + 2 * 4


def a_sharded_step(mixed_precision: str) -> tuple[int, int, int]:
    """Train one step on FSDP2, and return what this process has: weights, gradients, optimizer."""
    from accelerate import FullyShardedDataParallelPlugin

    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(), mixed_precision=mixed_precision)
    model = Transformer(layers=3)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(loss_of(model(TOKENS), TOKENS))
    optimizer.step()

    def here(tensors: Any) -> int:
        return bytes_of(tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors)

    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    return here(model.parameters()), here(param.grad for param in model.parameters()), here(state)


@pytest.mark.parametrize(("mixed_precision", "dtype"), [("no", "float32"), ("bf16", "bfloat16")])
def test_what_a_sharded_step_keeps_is_exact(mixed_precision: str, dtype: str) -> None:
    ranks = run_on_ranks(2, a_sharded_step, mixed_precision=mixed_precision)
    found = estimate(on_meta(lambda: Transformer(layers=3)), dtype, spread=Spread(processes=2, fsdp=True)).training
    assert found is not None
    for weights, gradients, optimizer in ranks:
        assert (found.weights, found.gradients, found.optimizer) == (weights, gradients, optimizer)


def test_one_process_gathers_nothing() -> None:
    alone = estimate(on_meta(Transformer), "bfloat16", spread=Spread(fsdp=True)).training
    assert alone is not None
    assert alone.communication == 0


def test_resharding_trades_memory_for_time() -> None:
    def gathered(reshard: bool) -> int:
        spread = Spread(processes=4, fsdp=True, reshard_after_forward=reshard)
        found = estimate(on_meta(lambda: Transformer(layers=8)), "bfloat16", spread=spread).training
        assert found is not None
        return found.communication

    model = Transformer(layers=8)
    block = sum(param.numel() for param in model.blocks[0].parameters())
    total = sum(param.numel() for param in model.parameters())
    assert gathered(False) == 2 * total + 4 * block
    assert gathered(True) == 2 * (total - 6 * block) + 4 * block


def test_quantised_weights_are_not_sharded() -> None:
    spread = Spread(processes=4, fsdp=True)
    model = on_meta(Transformer)
    assert estimate(model, "int8", spread=spread).inference == estimate(model, "int8").inference


def test_a_tensor_is_the_one_argument_of_its_batch() -> None:
    tokens = torch.ones(2, 4)
    assert Batch.of(tokens).args == (tokens,)
