"""Estimates against what is really allocated, and against the trace of a whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright import Accelerator, FullyShardedDataParallelPlugin
from meshwright.inference.estimating.batches import ModelArguments
from meshwright.tools.estimate.estimate import ProcessLayout, TrainingMemory, estimate
from meshwright.tools.estimate.program import Program
from meshwright.tools.plan.memory.peak import memory_of
from tests.inference.estimating.test_sizes import MODELS, on_meta, weights_of
from tests.parallel.small_transformer import LENGTH, Transformer, loss_of
from tests.ranks import ranks, run_on_ranks

TOKENS = torch.randint(0, 32, (4, LENGTH), generator=torch.Generator().manual_seed(0))
BATCH = ModelArguments(args=(TOKENS,))


def bytes_of(tensors: Any) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def loss(outputs: Tensor, batch: ModelArguments) -> Tensor:
    return loss_of(outputs, batch.args[0])


def training(model: nn.Module, dtype: str, **options: Any) -> TrainingMemory:
    found = estimate(model, dtype, **options).training
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "dtype", "pure"),
    [("transformer", "float32", False), ("tied", "bfloat16", False), ("convolutions", "bfloat16", True)],
)
def test_what_a_training_step_keeps_is_exact(name: str, dtype: str, pure: bool) -> None:
    """One real step under autocast, as an Accelerator makes it, or in bf16 alone."""
    model = MODELS[name]()
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

    found = training(on_meta(MODELS[name]), dtype, pure=pure)
    assert found.weights == weights_of(model)
    assert found.gradients == bytes_of(param.grad for param in model.parameters() if param.grad is not None)
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    assert found.optimizer == bytes_of(state)
    assert found.peak_in == "update"
    assert found.total == found.weights + found.gradients + found.optimizer + found.temporaries


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


@pytest.mark.parametrize(("dtype", "autocast"), [("float32", None), ("bfloat16", torch.bfloat16)])
def test_activations_are_what_autograd_keeps(dtype: str, autocast: torch.dtype | None) -> None:
    real = really_saved(Transformer(), TOKENS, autocast)
    found = training(on_meta(Transformer), dtype, batch=BATCH, loss=loss)
    assert found.most_activations is not None
    assert found.copies is not None
    assert (found.copies > 0) == (autocast is not None)
    assert found.most_activations + found.copies == pytest.approx(real, rel=0.15)


def test_copies_by_autocast_do_not_grow_with_the_batch() -> None:
    model = on_meta(Transformer)
    small, large = (
        training(model, "bfloat16", batch=ModelArguments.of(TOKENS.repeat(times, 1)), loss=loss) for times in (1, 8)
    )
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    weights = sum(module.weight.numel() for module in linear)
    biases = sum(module.bias.numel() for module in linear if module.bias is not None)
    assert small.copies is not None
    assert small.copies == large.copies
    assert 2 * weights <= small.copies <= 2 * (weights + biases)
    assert small.most_activations is not None
    assert large.most_activations is not None
    assert large.most_activations > 7 * small.most_activations
    assert large.peak_in == "backward"


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
    found = estimate(on_meta(lambda: Transformer(layers=3)), "float32", batch=ModelArguments.of(tokens)).inference
    assert found.forward is not None
    assert found.forward - bytes_of([tokens]) == pytest.approx(peak, rel=0.1)


def test_a_deep_model_is_estimated_from_few_of_its_blocks() -> None:
    model = on_meta(lambda: Transformer(layers=9))
    found = training(model, "float32", batch=BATCH, loss=loss)
    whole = Program(model=model, batch=BATCH, loss=loss, stored_in=torch.float32)
    (trace,) = whole.traces([None])
    assert trace.blocks == 9
    assert found.weights == weights_of(Transformer(layers=9))
    assert found.total == pytest.approx(memory_of(trace).total, rel=0.01)


def test_a_model_is_left_as_it_was() -> None:
    model = Transformer().eval()
    model.norm.train()
    before = {name: (id(param), param.clone()) for name, param in model.named_parameters()}
    modes = [module.training for module in model.modules()]
    estimate(model, "bfloat16", batch=BATCH, loss=loss)
    assert [module.training for module in model.modules()] == modes
    for name, param in model.named_parameters():
        assert id(param) == before[name][0]
        assert torch.equal(param, before[name][1])
        assert param.grad is None


def test_a_number_that_is_asked_for_is_guessed_and_told() -> None:
    class Looks(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) if input.sum() > 0 else input

    found = estimate(on_meta(lambda: Looks(4, 4)), "float32", batch=ModelArguments.of(torch.ones(2, 4)))
    assert found.left_out is None
    (guess,) = found.guesses
    assert "test_estimate.py" in guess


def test_what_does_not_run_is_left_out_with_the_reason() -> None:
    found = estimate(on_meta(lambda: nn.Linear(4, 4)), "float32", batch=ModelArguments.of(torch.ones(2, 3)))
    assert found.left_out is not None
    assert "did not run on fake tensors (RuntimeError: " in found.left_out
    assert found.inference.forward is None
    assert found.training is not None
    assert found.training.activations is None
    assert found.training.total - found.training.temporaries == 4 * 20 * 4 + 2 * 4


def test_a_model_without_trained_parameters_is_for_inference() -> None:
    found = estimate(nn.Linear(4, 4).requires_grad_(False), "float32")
    assert found.training is None
    assert found.inference.weights == 80


# --- Several processes ------------------------------------------------------------------------------------------------


def test_copies_on_several_processes_have_buckets() -> None:
    one = training(on_meta(Transformer), "float32")
    two = training(on_meta(Transformer), "float32", spread=ProcessLayout(processes=2))
    assert two.communication == two.gradients == one.gradients
    assert two.total == one.total + one.gradients


def test_shards_are_equal_parts_padded() -> None:
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 3, bias=False))
    found = training(model, "float32", spread=ProcessLayout(processes=2, fsdp=True))
    assert found.weights == 4 * (3 * 4 + 2 * 5)  # rows: 3 of 5, 2 of 3
    assert found.optimizer == 2 * found.weights + 2 * 4


def a_sharded_step(mixed_precision: str) -> tuple[int, int, int]:
    """Train one step on FSDP2, and return what this process has: weights, gradients, optimizer."""
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


def test_what_a_sharded_step_keeps_is_exact() -> None:
    per_rank = run_on_ranks(2, a_sharded_step, mixed_precision="bf16")
    found = training(on_meta(lambda: Transformer(layers=3)), "bfloat16", spread=ProcessLayout(processes=2, fsdp=True))
    for weights, gradients, optimizer in per_rank:
        assert (found.weights, found.gradients, found.optimizer) == (weights, gradients, optimizer)


def test_one_process_gathers_nothing() -> None:
    assert training(on_meta(Transformer), "bfloat16", spread=ProcessLayout(fsdp=True)).communication == 0


def test_resharding_trades_memory_for_time() -> None:
    def gathered(reshard: bool) -> TrainingMemory:
        spread = ProcessLayout(processes=4, fsdp=True, reshard_after_forward=reshard)
        return training(on_meta(lambda: Transformer(layers=5)), "bfloat16", spread=spread, batch=BATCH, loss=loss)

    kept, resharded = gathered(False), gathered(True)
    whole = sum(param.numel() for param in Transformer(layers=5).parameters())
    assert kept.communication >= 2 * whole > resharded.communication > 0
    assert kept.total > resharded.total


def test_quantised_weights_are_not_sharded() -> None:
    spread = ProcessLayout(processes=4, fsdp=True)
    model = on_meta(Transformer)
    assert estimate(model, "int8", spread=spread).inference == estimate(model, "int8").inference


@ranks(2)
def test_a_rank_of_a_process_group_is_refused() -> None:
    Accelerator(cpu=True)
    with pytest.raises(RuntimeError, match="belongs to a process group"):
        estimate(nn.Linear(2, 2), "float32")
