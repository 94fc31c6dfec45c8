"""Accumulation windows, and losses normalised by the items they sum over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from meshwright import Accelerator, GradientAccumulationPlugin
from tests.ranks import ranks, run_on_ranks
from tests.training import CLASSES, FEATURES, loss_of, make_data, make_model

ACCUMULATION = 3
LENGTHS = [[5, 1], [2, 7], [3, 3], [11, 2], [1, 1], [4, 9]]  # [micro-batch of the global order][sequence]


def ragged(sequence_lengths: list[int], seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(sequence_lengths)
    return (
        torch.randn(tokens, FEATURES, generator=generator),
        torch.randint(0, CLASSES, (tokens,), generator=generator),
    )


def summed_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def one_big_batch() -> list[Tensor]:
    model = make_model()
    batches = [ragged(lengths, seed) for seed, lengths in enumerate(LENGTHS)]
    everything = tuple(torch.cat(part) for part in zip(*batches, strict=True))
    (summed_loss(model, everything) / len(everything[0])).backward()
    return [param.grad for param in model.parameters()]


def token_exact_gradients(**options: Any) -> list[Tensor]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(LENGTHS) // world(), **options)
    model = accelerator.prepare(make_model())
    for micro_batch in range(accelerator.gradient_accumulation_steps):
        index = micro_batch * accelerator.num_processes + accelerator.process_index
        batch = ragged(LENGTHS[index], seed=index)
        with accelerator.accumulate(model):
            accelerator.backward(summed_loss(model, batch), num_items=len(batch[0]))
    assert accelerator.sync_gradients
    return [param.grad for param in model.parameters()]


def world() -> int:
    from meshwright import PartialState

    return PartialState(cpu=True).num_processes


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ragged_micro_batches_have_the_gradients_of_one_big_batch(world_size: int) -> None:
    expected = one_big_batch()
    per_rank = [token_exact_gradients()] if world_size == 1 else run_on_ranks(world_size, token_exact_gradients)
    for gradients in per_rank:
        for ours, reference in zip(gradients, expected, strict=True):
            assert torch.allclose(ours, reference, atol=1e-6, rtol=0)


def test_a_plain_mean_would_have_been_wrong_on_this_data() -> None:
    """Show that the test above can fail: averaging means weighs short sequences too much."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(LENGTHS))
    model = accelerator.prepare(make_model())
    for index, lengths in enumerate(LENGTHS):
        batch = ragged(lengths, seed=index)
        with accelerator.accumulate(model):
            accelerator.backward(summed_loss(model, batch) / len(batch[0]))
    difference = max(
        float((param.grad - reference).abs().max())
        for param, reference in zip(model.parameters(), one_big_batch(), strict=True)
    )
    assert difference > 1e-3


@ranks(2)
def test_without_accumulation_the_counts_of_all_ranks_divide_the_loss() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(make_model())
    batch = ragged(LENGTHS[accelerator.process_index], seed=accelerator.process_index)
    accelerator.backward(summed_loss(model, batch), num_items=torch.tensor(len(batch[0])))
    reference = make_model()
    both = [ragged(LENGTHS[rank], seed=rank) for rank in range(2)]
    tokens = sum(len(batch[0]) for batch in both)
    (sum(summed_loss(reference, batch) for batch in both) / tokens).backward()
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours.grad, expected.grad, atol=1e-6, rtol=0)


@ranks(2)
def test_a_rank_without_items_does_not_disturb_and_no_items_at_all_give_zero_gradients() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(make_model())
    batch = ragged(LENGTHS[0], seed=0)
    mine = len(batch[0]) if accelerator.process_index == 0 else 0
    loss = summed_loss(model, batch) * (mine > 0)
    accelerator.backward(loss, num_items=mine)
    reference = make_model()
    (summed_loss(reference, batch) / len(batch[0])).backward()
    assert torch.allclose(model.module[0].weight.grad, reference[0].weight.grad, atol=1e-6, rtol=0)
    model.zero_grad()
    accelerator.backward(summed_loss(model, batch) * 0, num_items=0)
    assert torch.count_nonzero(model.module[0].weight.grad) == 0


@ranks(2)
def test_clipping_and_the_fp16_scaler_see_token_exact_gradients() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION, mixed_precision="fp16")
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    for micro_batch in range(ACCUMULATION):
        index = micro_batch * 2 + accelerator.process_index
        batch = ragged(LENGTHS[index], seed=index)
        with accelerator.accumulate(model):
            accelerator.backward(summed_loss(model, batch), num_items=len(batch[0]))
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
    expected = torch.nn.utils.get_total_norm(one_big_batch())
    assert norm.item() == pytest.approx(expected.item(), rel=5e-3)
    assert not accelerator.optimizer_step_was_skipped
    moved = model.module[0].weight - make_model()[0].weight
    assert torch.allclose(moved, -one_big_batch()[0], atol=5e-3)


def test_mixing_sums_and_means_in_one_window_is_refused() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(make_model())
    batch = ragged([3], seed=0)
    with accelerator.accumulate(model):
        accelerator.backward(summed_loss(model, batch), num_items=3)
    with accelerator.accumulate(model), pytest.raises(ValueError, match="with num_items and without"):
        accelerator.backward(summed_loss(model, batch))


def test_mixing_means_and_sums_in_one_window_is_refused() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(make_model())
    batch = ragged([3], seed=0)
    with accelerator.accumulate(model):
        accelerator.backward(summed_loss(model, batch) / 3)
    with accelerator.accumulate(model), pytest.raises(ValueError, match="with num_items and without"):
        accelerator.backward(summed_loss(model, batch), num_items=3)


def test_two_counts_for_one_accumulating_micro_batch_are_refused() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(make_model())
    batch = ragged([3], seed=0)
    with accelerator.accumulate(model):
        accelerator.backward(summed_loss(model, batch), num_items=3)
        with pytest.raises(ValueError, match="called twice"):
            accelerator.backward(summed_loss(model, batch), num_items=3)


def closing_steps(accelerator: Accelerator, samples: int) -> list[bool]:
    model = make_model()
    loader = DataLoader(make_data(samples), batch_size=1)
    model, loader = accelerator.prepare(model, loader)
    closes = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            closes.append(accelerator.sync_gradients)
    return closes


def test_a_window_closes_when_it_is_full_and_at_the_end_of_the_loader() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    assert closing_steps(accelerator, samples=7) == [False, False, True, False, False, True, True]
    assert closing_steps(accelerator, samples=4) == [False, False, True, True], "the next epoch begins a new window"


def test_a_window_may_span_epochs_on_request() -> None:
    plugin = GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    assert closing_steps(accelerator, samples=4) == [False, False, True, False]
    assert closing_steps(accelerator, samples=2) == [False, True]


def test_optimizer_steps_and_zeroes_only_when_a_window_closes() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    batch = make_data(4)[:]
    before = model[0].weight.clone()
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model[0].weight, before)
    assert model[0].weight.grad is not None
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(model[0].weight, before)
    assert model[0].weight.grad is None


def test_two_halves_accumulated_equal_one_whole_batch() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(make_model())
    features, labels = make_data(8)[:]
    for half in (slice(0, 4), slice(4, 8)):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, (features[half], labels[half])))
    reference = make_model()
    loss_of(reference, (features, labels)).backward()
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours.grad, expected.grad, atol=1e-6, rtol=0)


def test_clipping_while_gradients_accumulate_does_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(make_model())
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, make_data(4)[:]))
        before = model[0].weight.grad.clone()
        norm = accelerator.clip_grad_norm_(model.parameters(), 1e-6)
        accelerator.clip_grad_value_(model.parameters(), 1e-6)
    assert torch.equal(model[0].weight.grad, before)
    assert norm > 0
    assert "while gradients still accumulate" in caplog.text
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, make_data(4)[:]))
        accelerator.clip_grad_norm_(model.parameters(), 1e-6)
    assert torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]) <= 1.01e-6
