"""Gradients are summed as DDP sums them, in the backward pass, and only if every rank takes part to the end."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from meshwright import PartialState
from meshwright.errors import UnsupportedSettingError
from meshwright.parallel.replicas.reducer import GradientReducer
from tests.ranks import RankFailure, new_pool, ranks

FEATURES = 12
SMALL = {"bucket_bytes": 600, "first_bucket_bytes": 100}
"""Sizes that give several buckets."""


class TwoBranches(nn.Module):
    """Use the branches that are named, in this order."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, FEATURES)
        self.branches = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))

    def forward(self, inputs: Tensor, order: tuple[int, ...]) -> Tensor:
        hidden = self.stem(inputs)
        for index in order:
            hidden = torch.tanh(self.branches[index](hidden))
        return hidden


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def of_two_dtypes() -> nn.Module:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(FEATURES, 16)
            self.second = nn.Linear(16, 16, dtype=torch.float64)
            self.third = nn.Linear(16, 1)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.third(self.second(self.first(inputs).double()).float())  # type: ignore[no-any-return]

    return Casting()


def with_a_shared_weight() -> nn.Module:
    shared = nn.Linear(FEATURES, FEATURES)
    return nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(FEATURES, 1))


def channels_last() -> nn.Module:
    convolution = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    return nn.Sequential(nn.Unflatten(1, (3, 2, 2)), convolution, nn.Flatten(), nn.Linear(4, 1))


MODELS = [mlp, of_two_dtypes, with_a_shared_weight, channels_last]


def copies(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Make the same model twice on every rank."""
    PartialState(cpu=True)
    torch.manual_seed(0)
    model = make()
    return model, copy.deepcopy(model)


def batches(count: int, rank: int | None = None) -> Iterator[Tensor]:
    """Yield the inputs of a rank."""
    generator = torch.Generator().manual_seed(100 + (dist.get_rank() if rank is None else rank))
    for _ in range(count):
        yield torch.randn(4, FEATURES, generator=generator)


def bound(model: nn.Module, divisor: int | None = None, **sizes: int) -> GradientReducer:
    reducer = GradientReducer(model.parameters(), **(sizes or SMALL))
    reducer.bind(None, divisor or dist.get_world_size())
    return reducer


def reduced_backward(reducer: GradientReducer, loss: Tensor) -> float:
    reducer.begin()
    loss.backward()  # type: ignore[no-untyped-call]
    return reducer.finish()


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if param.grad is None else param.grad.clone() for param in model.parameters()]


def assert_equal(ours: list[Tensor | None], theirs: list[Tensor | None], *, exactly: bool) -> None:
    """Compare; the order of the terms of a sum is that of the backend, and depends on the size of the buffer."""
    for a, b in zip(ours, theirs, strict=True):
        if a is None or b is None:
            assert a is b
        elif exactly:
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("sizes", [SMALL, {"bucket_bytes": 1 << 20, "first_bucket_bytes": 1 << 20}])
@ranks(2, 4)
def test_gradients_equal_those_of_ddp(make: Callable[[], nn.Module], sizes: dict[str, int], world_size: int) -> None:
    model, other = copies(make)
    reducer, theirs = bound(model, **sizes), DistributedDataParallel(other)
    for inputs in batches(3):
        reduced_backward(reducer, model(inputs).pow(2).mean())
        theirs(inputs).pow(2).mean().backward()
        assert_equal(gradients(model), gradients(other), exactly=world_size == 2)
        for net in (model, other):
            net.zero_grad()


@pytest.mark.parametrize("to_none", [True, False])
@ranks(2)
def test_training_equals_ddp_to_the_bit(to_none: bool) -> None:
    model, other = copies(mlp)
    reducer, theirs = bound(model), DistributedDataParallel(other)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (model, other)]
    for index, inputs in enumerate(batches(12)):
        closes = index % 3 == 2
        theirs.require_backward_grad_sync = closes
        theirs(inputs).pow(2).mean().backward()
        reducer.begin(closes)
        model(inputs).pow(2).mean().backward()
        reducer.finish()
        if closes:
            for net, optimizer in zip((model, other), optimizers, strict=True):
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
            reducer.release()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@ranks(2)
def test_an_average_in_every_pass_without_zeroing_equals_ddp() -> None:
    model, other = copies(mlp)
    reducer, theirs = bound(model), DistributedDataParallel(other)
    for index, inputs in enumerate(batches(4)):
        reduced_backward(reducer, model(inputs).pow(2).mean())
        theirs(inputs).pow(2).mean().backward()
        assert_equal(gradients(model), gradients(other), exactly=False)
        if index == 1:
            reducer.release()
        if index == 2:
            for net in (model, other):
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)


@ranks(2, 3)
def test_a_parameter_that_only_some_ranks_used_counts_as_zeros_on_the_others(world_size: int) -> None:
    model, other = copies(TwoBranches)
    reducer, theirs = bound(model), DistributedDataParallel(other, find_unused_parameters=True)
    for order in [(0, 1), (1, 0), (0,), (1,)]:
        mine = order if dist.get_rank() == 0 else order[:1]
        for inputs in batches(1):
            reduced_backward(reducer, model(inputs, mine).pow(2).mean())
            theirs(inputs, mine).pow(2).mean().backward()
        assert_equal(gradients(model), gradients(other), exactly=world_size == 2)
        assert model.branches[2].weight.grad is None  # type: ignore[union-attr]
        for net in (model, other):
            net.zero_grad()


@ranks(3)
def test_ranks_may_compute_their_gradients_in_different_orders() -> None:
    model, _ = copies(TwoBranches)
    reducer = bound(model, bucket_bytes=1, first_bucket_bytes=1)
    orders = [(0, 1, 2), (2, 1, 0), (1,)]
    expected = [torch.zeros_like(param) for param in model.parameters()]
    for rank, order in enumerate(orders):
        for inputs in batches(1, rank):
            model(inputs, order).pow(2).mean().backward()
        for total, param in zip(expected, model.parameters(), strict=True):
            total += 0 if param.grad is None else param.grad / 3
        model.zero_grad()
    for inputs in batches(1):
        reduced_backward(reducer, model(inputs, orders[dist.get_rank()]).pow(2).mean())
    assert_equal(gradients(model), list(expected), exactly=False)


@ranks(2)
def test_the_divisor_is_fixed_and_need_not_be_the_number_of_ranks() -> None:
    model, _ = copies(mlp)
    inputs = torch.ones(4, FEATURES)
    model(inputs).mean().backward()
    own = gradients(model)
    model.zero_grad()
    reduced_backward(bound(model, divisor=8), model(inputs).mean())
    assert_equal(gradients(model), [None if g is None else g / 4 for g in own], exactly=True)


@pytest.mark.parametrize("divisor", [2, 3])
@ranks(2)
def test_two_losses_of_a_step_add_up(divisor: int) -> None:
    model, other = copies(mlp)
    reducer = bound(model, divisor)
    first, second = batches(2)
    reduced_backward(reducer, model(first).pow(2).mean())
    reduced_backward(reducer, model(second).pow(2).mean())
    reduced_backward(bound(other, divisor), other(first).pow(2).mean() + other(second).pow(2).mean())
    assert_equal(gradients(model), gradients(other), exactly=False)


@ranks(2)
def test_two_backward_passes_before_one_reduction_add_up() -> None:
    model, other = copies(mlp)
    reducer = bound(model)
    first, second = batches(2)
    for _ in range(2):  # the first time some buckets are reduced twice, later all of them after the passes
        reducer.begin()
        model(first).pow(2).mean().backward()
        if dist.get_rank() == 0:
            model(second).pow(2).mean().backward()
        reducer.finish()
        loss = other(first).pow(2).mean()
        reduced_backward(bound(other), loss + other(second).pow(2).mean() if dist.get_rank() == 0 else loss)
        assert_equal(gradients(model), gradients(other), exactly=False)
        for net in (model, other):
            net.zero_grad()


@ranks(2)
def test_a_shared_parameter_under_reentrant_checkpointing_is_reduced_once_it_is_complete() -> None:
    model, other = copies(with_a_shared_weight)
    shared, tail = model[0], model[4]  # type: ignore[index]
    reducer = bound(model, bucket_bytes=1, first_bucket_bytes=1)
    for inputs in batches(2):
        inputs = inputs.requires_grad_()
        hidden = checkpoint(lambda x: torch.tanh(shared(x)), inputs, use_reentrant=True)
        reduced_backward(reducer, tail(torch.tanh(shared(hidden))).pow(2).mean())
        reduced_backward(bound(other), other(inputs).pow(2).mean())
        assert_equal(gradients(model), gradients(other), exactly=False)
        for net in (model, other):
            net.zero_grad()


@ranks(3)
def test_signals_are_summed() -> None:
    model, _ = copies(mlp)
    reducer = bound(model)
    sums = []
    for value in (0.0, float(dist.get_rank()), 0.0):
        reducer.signal = value
        sums.append(reduced_backward(reducer, model(torch.ones(1, FEATURES)).mean()))
    assert sums == [0.0, 3.0, 0.0]


@ranks(2)
def test_a_backward_pass_that_does_not_reach_the_model_reduces_nothing() -> None:
    model, other = copies(mlp)
    reducer = bound(model)
    if dist.get_rank() == 0:  # a collective of one rank alone would not end
        assert reduced_backward(reducer, other(torch.ones(1, FEATURES)).mean()) == 0.0
    assert gradients(model) == [None] * 6


@ranks(2)
def test_frozen_parameters_are_left_alone() -> None:
    model, _ = copies(mlp)
    model[0].requires_grad_(False)  # type: ignore[index]
    reducer = bound(model)
    model[2].requires_grad_(False)  # type: ignore[index]
    reduced_backward(reducer, model(torch.ones(1, FEATURES)).mean())
    assert [gradient is None for gradient in gradients(model)] == [True] * 4 + [False] * 2


@ranks(2)
def test_after_close_gradients_are_those_of_the_rank_alone() -> None:
    model, other = copies(mlp)
    reducer = bound(model)
    reducer.close()
    (inputs,) = batches(1)
    reduced_backward(reducer, model(inputs).pow(2).mean())
    other(inputs).pow(2).mean().backward()
    assert_equal(gradients(model), gradients(other), exactly=True)


@ranks(2)
def test_binding_a_new_group_leaves_reduced_gradients_as_they_are() -> None:
    model, _ = copies(mlp)
    reducer = bound(model)
    (inputs,) = batches(1)
    reduced_backward(reducer, model(inputs).pow(2).mean())
    before = gradients(model)
    reducer.bind(dist.new_group([0, 1]), 2)
    assert_equal(gradients(model), before, exactly=True)


@ranks(2)
def test_a_sparse_gradient_is_refused_by_name_after_the_backward_pass() -> None:
    model, _ = copies(lambda: nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1)))
    reducer = bound(model, bucket_bytes=1, first_bucket_bytes=1)
    reducer.begin()
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(UnsupportedSettingError, match="sparse gradient"):
        reducer.finish()
    dist.barrier()


class GivenUpError(Exception):
    pass


@pytest.mark.parametrize("waits", [0, 1, 5])
@ranks(2)
def test_a_reduction_that_is_given_up_leaves_every_gradient_as_it_was(waits: int) -> None:
    model, other = copies(mlp)
    reducer = bound(model, bucket_bytes=1, first_bucket_bytes=1)
    first, second = batches(2)
    other(first).pow(2).mean().backward()
    reducer.begin()
    model(first).pow(2).mean().backward()
    done: list[Any] = []

    def wait_a_while(work: Any) -> None:
        work.wait()
        done.append(work)
        if len(done) > waits:
            raise GivenUpError

    with pytest.raises(GivenUpError):
        reducer.finish(wait_a_while)
    assert_equal(gradients(model), gradients(other), exactly=True)
    reducer.bind(None, 2)
    other(second).pow(2).mean().backward()
    reducer.begin()
    model(second).pow(2).mean().backward()
    assert_equal(gradients(model), gradients(other), exactly=True)
    reducer.finish()
    average = [None if g is None else g / 2 for g in gradients(other)]
    for gradient in average:
        dist.all_reduce(gradient)
    assert_equal(gradients(model), average, exactly=True)


@ranks(2)
def test_an_error_of_starting_a_reduction_does_not_interrupt_the_backward_pass() -> None:
    model, other = copies(mlp)
    reducer = bound(model)
    (inputs,) = batches(1)
    other(inputs).pow(2).mean().backward()
    reducer.bind("no group", 2)
    reducer.begin()
    model(inputs).pow(2).mean().backward()
    with pytest.raises((AttributeError, TypeError, ValueError)):
        reducer.finish()
    assert_equal(gradients(model), gradients(other), exactly=True)


# --- a rank that is killed ------------------------------------------------------------------------------------------


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lose_a_rank(folder: Path, moment: str) -> None:
    """Make a step on three ranks of which the last is killed; the others take its samples and complete the step."""
    model, _ = copies(mlp)
    rank = dist.get_rank()
    reducer = bound(model, bucket_bytes=1, first_bucket_bytes=1)
    reducer.begin()
    (inputs,) = batches(1)
    loss = model(inputs).pow(2).mean()
    if rank == 2:
        if moment == "before the backward pass":
            die()
        if moment == "in the backward pass":
            model[2].weight.register_post_accumulate_grad_hook(die)  # type: ignore[index]
        loss.backward()
        die()  # the last reduction has not been started yet
    loss.backward()
    own = gradients(model)
    group, lost = dist.group.WORLD, folder / "lost"

    def wait(work: Any) -> None:
        """Give up where another rank has: it is not connected to the killed one by this reduction."""
        while not work.is_completed():
            if lost.exists():
                raise RuntimeError("The connection was closed on another rank.")
            time.sleep(0.01)
        work.wait()

    with pytest.raises(RuntimeError, match=r"closed|reset"):
        reducer.finish(wait)
    lost.touch()
    assert_equal(gradients(model), own, exactly=True)
    dist.destroy_process_group()
    assert group is not None  # it is kept: freeing it would wait for a reduction that nobody answers
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    reducer.bind(None, 3)
    reducer.begin()
    part = next(batches(1, rank=2)).chunk(2)[rank]
    (model(part).pow(2).mean() / 2).backward()
    reducer.finish()
    torch.save(gradients(model), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("moment", ["before the backward pass", "in the backward pass", "after the backward pass"])
def test_survivors_of_a_kill_keep_their_gradients_and_complete_the_step(tmp_path: Path, moment: str) -> None:
    pool = new_pool()  # whose workers no other test has
    try:
        with pytest.raises(RankFailure) as failure:
            pool.run(3, lose_a_rank, {"folder": tmp_path, "moment": moment})
    finally:
        pool.close()
    assert "rank 2" in str(failure.value)
    assert "exit code -9" in str(failure.value)
    assert "rank 0" not in str(failure.value)
    assert "rank 1" not in str(failure.value)
    torch.manual_seed(0)
    model = mlp()
    for rank in range(3):
        (inputs,) = batches(1, rank)
        (model(inputs).pow(2).mean() / 3).backward()
    expected = gradients(model)
    for rank in range(2):
        assert_equal(torch.load(tmp_path / f"{rank}.pt"), expected, exactly=False)
