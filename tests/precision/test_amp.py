"""fp16 and bf16: autocast around the forward pass, fp32 outside it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from meshwright import Accelerator, AutocastKwargs
from tests.ranks import ranks
from tests.training import loss_of, make_data, make_model

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Inspector(nn.Module):
    """Report the dtype inside, return nested outputs of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, depth: int = 0) -> dict[str, Any]:
        y = self.linear(x)
        self.seen.append(y.dtype)
        if depth:
            self(x, depth - 1)
            self.seen.append(self.linear(x).dtype)
        return {"logits": y, "parts": [y, (y, 3)], "ids": torch.arange(2), "double": x.double()}


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_forward_computes_low_and_returns_fp32(precision: str) -> None:
    model = Accelerator(cpu=True, mixed_precision=precision).prepare(Inspector())
    out = model(torch.randn(2, 4))
    assert model.seen == [DTYPES[precision]]
    assert out["logits"].dtype == out["parts"][0].dtype == out["parts"][1][0].dtype == torch.float32
    assert out["ids"].dtype == torch.int64
    assert out["double"].dtype == torch.float64
    assert model.linear.weight.dtype == torch.float32


def test_nested_forwards_keep_autocast_to_the_end() -> None:
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(Inspector())
    model(torch.randn(2, 4), depth=2)
    assert model.seen == [torch.bfloat16] * 5
    assert not torch.is_autocast_enabled("cpu")


def test_an_error_in_the_forward_pass_leaves_autocast() -> None:
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(Inspector())
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 5))
    assert not torch.is_autocast_enabled("cpu")
    assert model(torch.randn(2, 4))["logits"].dtype == torch.float32


def test_full_precision_leaves_the_model_alone() -> None:
    own = make_model()
    model = Accelerator(cpu=True).prepare(own)
    assert model is own
    assert "forward" not in vars(model)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_training_equals_a_hand_written_amp_loop_to_the_bit(precision: str) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    reference = make_model()
    by_hand = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    data = make_data(80)
    for step in range(10):
        features, labels = data[step * 8 : step * 8 + 8]
        accelerator.backward(loss_of(model, (features, labels)))
        optimizer.step()
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=DTYPES[precision]):
            logits = reference(features)
        scaler.scale(nn.functional.cross_entropy(logits.float(), labels)).backward()
        scaler.step(by_hand)
        scaler.update()
        by_hand.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def test_autocast_covers_code_outside_the_model() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    a = torch.randn(4, 4)
    with accelerator.autocast():
        assert (a @ a).dtype == torch.bfloat16
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert (a @ a).dtype == torch.float32
    with Accelerator(cpu=True, mixed_precision="no").autocast():
        assert (a @ a).dtype == torch.float32


def test_the_autocast_handler_reaches_the_forward_pass() -> None:
    handler = AutocastKwargs(enabled=False)
    model = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[handler]).prepare(Inspector())
    model(torch.randn(2, 4))
    assert model.seen == [torch.float32]


def test_a_prepared_model_can_be_copied_and_pickled() -> None:
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(Inspector())
    x = torch.randn(2, 4)
    expected = model(x)["logits"]
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(x)["logits"], expected)
        assert again.seen[-1] == torch.bfloat16
        again.linear.weight.data.zero_()
        assert not torch.equal(again(x)["logits"], expected), "the copy computes with its own weights"
        assert torch.equal(model(x)["logits"], expected)


def test_unwrapping_can_give_the_models_own_forward_back() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(Inspector())
    kept = accelerator.unwrap_model(model)
    assert kept(torch.randn(2, 4))["logits"].dtype == torch.float32
    bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert bare is model
    assert "forward" not in vars(bare)
    assert "_original_forward" not in vars(bare)
    bare(torch.randn(2, 4))
    assert bare.seen[-1] == torch.float32


def test_a_forward_that_was_replaced_before_prepare_is_given_back() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = Inspector()
    model.forward = lambda x: x + 1  # type: ignore[method-assign]
    patched = model.forward
    accelerator.prepare(model)
    assert model.forward is not patched
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False).forward is patched


def test_a_compiled_model_can_be_prepared_and_unwrapped() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    own = make_model()
    compiled = torch.compile(own, backend="eager")
    model = accelerator.prepare(compiled)
    assert model(torch.randn(2, 12)).dtype == torch.float32
    assert accelerator.unwrap_model(model) is compiled
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is own
    bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert "forward" not in vars(own)
    features = torch.randn(2, 12)
    assert torch.equal(bare(features), own(features))
    assert torch.equal(own(features), nn.Sequential.forward(own, features))


def test_compiling_a_prepared_model_traces_its_autocast() -> None:
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(Inspector())
    expected = model(torch.ones(2, 4))["logits"]
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: model.forward(x)["logits"], backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2, 4)), expected)


@ranks(2)
def test_mixed_precision_composes_with_ddp() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    model = accelerator.prepare(Inspector())
    out = model(torch.randn(2, 4))
    assert out["logits"].dtype == torch.float32
    assert model.module.seen == [torch.bfloat16]
    accelerator.backward(out["logits"].sum())
    gathered = accelerator.gather(model.module.linear.weight.grad[None])
    assert torch.equal(gathered[0], gathered[1])
