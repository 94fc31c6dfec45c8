"""The cross-entropy of a linear layer without its logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from meshwright import Accelerator, FullyShardedDataParallelPlugin, linear_cross_entropy
from meshwright.errors import UnsupportedSettingError
from tests.parallel.modules.memory.counting import peak_of
from tests.ranks import ranks

TOKENS, FEATURES, CLASSES = 96, 16, 501


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(4, TOKENS // 4, FEATURES, dtype=dtype, requires_grad=True)
    weight = (torch.randn(CLASSES, FEATURES) / FEATURES**0.5).to(dtype).requires_grad_()
    bias = torch.randn(CLASSES, dtype=dtype, requires_grad=True)
    targets = torch.randint(CLASSES, (4, TOKENS // 4))
    targets[0, :5] = -100
    return hidden, weight, bias, targets


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, **options: Any) -> Tensor:
    logits = linear(hidden, weight, bias).float().reshape(-1, weight.shape[0])
    return cross_entropy(logits, targets.reshape(-1), **options)


def results(loss_of: Callable[..., Tensor], dtype: torch.dtype = torch.float32, **options: Any) -> list[Tensor]:
    hidden, weight, bias, targets = inputs(dtype)
    loss = loss_of(hidden, weight, targets, bias=bias, **options)
    (3 / TOKENS * loss if options.get("reduction") == "sum" else 3 * loss).backward()
    return [loss.detach(), *(each.grad for each in (hidden, weight, bias) if each.grad is not None)]


@pytest.mark.parametrize("chunk_size", [1, 7, TOKENS, None])
@pytest.mark.parametrize(
    "options", [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"ignore_index": 3, "reduction": "sum"}]
)
def test_loss_and_gradients_are_those_of_all_logits(options: dict[str, Any], chunk_size: int | None) -> None:
    def ours(hidden: Tensor, weight: Tensor, targets: Tensor, **others: Any) -> Tensor:
        return linear_cross_entropy(hidden, weight, targets.abs() % CLASSES if smaller else targets, **others)

    def theirs(hidden: Tensor, weight: Tensor, targets: Tensor, **others: Any) -> Tensor:
        return plain(hidden, weight, targets.abs() % CLASSES if smaller else targets, **others)

    smaller = "ignore_index" in options
    for own, expected in zip(results(ours, chunk_size=chunk_size, **options), results(theirs, **options), strict=True):
        torch.testing.assert_close(own, expected, atol=1e-6, rtol=1e-6)


def test_bf16_weights_lose_no_more_than_with_all_logits() -> None:
    exact = results(plain)
    own = results(linear_cross_entropy, torch.bfloat16, chunk_size=5)
    usual = results(plain, torch.bfloat16)
    for ours, theirs, true in zip(own, usual, exact, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - true).norm() <= 1.1 * (theirs - true).norm() + 1e-6


def test_autocast_computes_products_in_its_dtype() -> None:
    hidden, weight, _, targets = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        own = linear_cross_entropy(hidden, weight, targets, chunk_size=9)
        expected = plain(hidden, weight, targets)
    assert own.dtype == torch.float32
    torch.testing.assert_close(own, expected, atol=1e-6, rtol=1e-6)
    assert not torch.equal(own, plain(hidden, weight, targets))
    own.backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_a_frozen_head_gets_no_gradient_and_evaluation_none_at_all() -> None:
    hidden, weight, _, targets = inputs()
    linear_cross_entropy(hidden, weight.detach(), targets).backward()
    assert hidden.grad is not None
    assert weight.grad is None
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, plain(hidden, weight, targets).detach())


def test_a_second_backward_pass_is_refused() -> None:
    hidden, weight, _, targets = inputs()
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass"):
        loss.backward()


def test_what_it_cannot_do_is_refused() -> None:
    hidden, weight, _, targets = inputs()
    with pytest.raises(UnsupportedSettingError, match="reduction='none'"):
        linear_cross_entropy(hidden, weight, targets, reduction="none")
    with pytest.raises(UnsupportedSettingError, match="floating point"):
        linear_cross_entropy(hidden, weight, torch.rand(4, TOKENS // 4, CLASSES))
    with pytest.raises(ValueError, match="chunk_size=0"):
        linear_cross_entropy(hidden, weight, targets, chunk_size=0)


def test_the_peak_is_a_fraction_of_that_with_all_logits() -> None:
    def peak(loss_of: Callable[..., Tensor], **options: Any) -> int:
        hidden = torch.randn(1024, 32, requires_grad=True)
        weight = torch.randn(8000, 32, requires_grad=True)
        targets = torch.randint(8000, (1024,))
        return peak_of(lambda: loss_of(hidden, weight, targets, **options).backward())

    assert peak(linear_cross_entropy, chunk_size=32) < peak(plain) / 15


class Model(nn.Module):
    """A model whose forward pass returns its loss."""

    def __init__(self, chunked: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.loss = linear_cross_entropy if chunked else plain

    def forward(self, tokens: Tensor) -> Tensor:
        return self.loss(self.embedding(tokens), self.head.weight, tokens.roll(1, -1))


@ranks(2)
@pytest.mark.parametrize("sharded", [False, True])
def test_several_processes_train_with_it_as_with_all_logits(sharded: bool) -> None:
    def losses(chunked: bool) -> list[float]:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if sharded else None
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = Model(chunked)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        seen = []
        for step in range(3):
            torch.manual_seed(10 * step + accelerator.process_index)
            loss = model(torch.randint(50, (2, 8)))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    assert losses(chunked=True) == pytest.approx(losses(chunked=False), abs=1e-6)


@ranks(2)
def test_a_weight_in_shards_is_refused() -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = accelerator.prepare(Model(chunked=True))
    with pytest.raises(UnsupportedSettingError, match="sharded"):
        linear_cross_entropy(torch.randn(2, 16), model.head.weight, torch.tensor([1, 2]))
