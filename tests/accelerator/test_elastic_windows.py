"""Accumulation windows whose samples are assigned anew: the gradients of a step are those of a run without losses."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.accelerator.accumulation import ElasticWindow
from meshwright.data.order.elastic import MicroBatch
from tests.data.members import Members
from tests.data.worlds import Data

REPLICAS, SHARE = 4, 3
DATA = Data(n=70, batch_size=SHARE, shuffle=True)
FEATURES = torch.randn(70, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LENGTHS = torch.randint(1, 9, (70,), generator=torch.Generator().manual_seed(1))


class OneMember:
    """A strategy whose members are in one process: the test adds their gradients up."""

    capabilities = type("Capabilities", (), {"defers_sync": True})
    num_gradient_shares = 1

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def scale_gradients(self, models: tuple[nn.Module, ...], factor: Tensor) -> None:
        for model in models:
            for param in model.parameters():
                assert param.grad is not None
                param.grad *= factor


class Window(ElasticWindow):
    """A window that leaves the division by all items to the test."""

    total = 0

    def _total(self, items: Tensor) -> Tensor:
        self.total += int(items)
        return torch.ones(())


class Trained(Members):
    """Members with a model each; a step adds up their gradients."""

    def __init__(self, num_steps: int, *, accumulates: bool = True, per_item: bool = False) -> None:
        self.accumulates, self.per_item = accumulates, per_item
        self.models: dict[int, nn.Module] = {}
        self.windows: dict[int, Window] = {}
        self.gradients: list[Tensor] = []
        self.loses_in_backward: tuple[int, ...] = ()
        super().__init__(DATA, REPLICAS, num_steps, trains=False)

    def add(self, rank: int, members: tuple[int, ...]) -> Any:
        loader = super().add(rank, members)
        self.models[rank] = new_model()
        strategy: Any = OneMember()
        self.windows[rank] = Window(loader.gradient_state, strategy, [self.models[rank]])
        return loader

    def next(self) -> bool:
        more = super().next()
        for rank in self.loaders if more else ():
            self.backward(rank, self.rows[rank])
        if self.loses_in_backward:
            self.lose(*self.loses_in_backward)
            self.loses_in_backward = ()
        for rank in self.loaders if more else ():
            assert self.windows[rank].gradient_state.sync_gradients == self.loaders[rank].closes_window
        return more

    def backward(self, rank: int, rows: list[int]) -> None:
        window, model = self.windows[rank], self.models[rank]
        with window.micro_batch((model,)) if self.accumulates else nullcontext():
            if not self.per_item:
                window.share_of_mean(losses_of(model, rows).mean()).backward()
                return
            with window.per_item(int(LENGTHS[rows].sum()), torch.device("cpu")) as factor:
                ((losses_of(model, rows) * LENGTHS[rows]).sum() * factor).backward()
                if self.loses_in_backward:  # the reduction, which is in the backward pass, finds members lost
                    window.gradient_state.sync_gradients = False

    def commit(self) -> None:
        held = [gradient_of(self.models[rank]) for rank in self.loaders]
        items = sum(self.windows[rank].total for rank in self.loaders)
        self.gradients.append(sum(held) / (items if self.per_item else REPLICAS))  # type: ignore[arg-type]
        for rank in self.loaders:
            self.models[rank].zero_grad()
            self.windows[rank].total = 0
        super().commit()

    def expected(self) -> list[Tensor]:
        """Return the gradients of every step's samples, computed at once."""
        gradients = []
        for samples in self.steps:
            model = new_model()
            losses = losses_of(model, samples)
            if self.per_item:
                ((losses * LENGTHS[samples]).sum() / LENGTHS[samples].sum()).backward()
            else:
                (losses.sum() / (REPLICAS * SHARE * self.num_steps)).backward()
            gradients.append(gradient_of(model))
        return gradients


def new_model() -> nn.Module:
    model = nn.Linear(5, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(model.weight, 0.1)
    return model


def losses_of(model: nn.Module, rows: list[int]) -> Tensor:
    return (model(FEATURES[rows]).squeeze(1) - 1).square()


def gradient_of(model: nn.Module) -> Tensor:
    assert isinstance(model.weight.grad, Tensor)
    return model.weight.grad.clone()


LOSSES = {1: lambda all: all.lose(2), 4: lambda all: all.lose(0, 3)}


@pytest.mark.parametrize("accumulates", [True, False])
@pytest.mark.parametrize("num_steps", [1, 2])
def test_mean_losses_weigh_by_their_samples(num_steps: int, accumulates: bool) -> None:
    undisturbed = Trained(num_steps, accumulates=accumulates)
    undisturbed.train()
    members = Trained(num_steps, accumulates=accumulates)
    members.train(LOSSES)
    assert members.steps == undisturbed.steps
    torch.testing.assert_close(members.gradients, undisturbed.gradients)
    torch.testing.assert_close(members.gradients, members.expected())


def test_the_number_of_micro_batches_counts_those_of_a_run_without_losses() -> None:
    members = Trained(num_steps=2)
    steps = []
    members.begin()
    for number in range(6):
        members.next()
        if number == 1:
            members.lose(2)
        steps.append(members.windows[0].step)
        if members.closes:
            members.commit()
    assert steps == [1, 2, 2, 3, 3, 4]
    while members.next():
        if members.closes:
            members.commit()
    assert members.windows[0].step == 0, "as at the end of every loader"


@pytest.mark.parametrize("accumulates", [True, False])
def test_items_are_counted_when_no_more_micro_batches_can_come(accumulates: bool) -> None:
    members = Trained(1, accumulates=accumulates, per_item=True)
    members.begin()
    members.next()
    members.commit()
    members.loses_in_backward = (1, 2)
    while members.next():
        if members.closes:
            members.commit()
    torch.testing.assert_close(members.gradients, members.expected())
    assert sorted({sample for step in members.steps for sample in step}) == list(range(70))


@pytest.mark.parametrize("per_item", [True, False])
def test_a_member_without_samples_counts_no_items_and_adds_nothing(per_item: bool) -> None:
    members = Trained(1, per_item=per_item)
    members.begin()
    members.next()
    empty = members.loaders[3]
    assert empty.elastic is not None
    empty.elastic.current = MicroBatch(
        members=(0, 3), positions=torch.tensor([7]).numpy(), number=0, of=1, next_round=1
    )
    before, counted = gradient_of(members.models[3]), members.windows[3].total
    members.backward(3, [7])
    assert empty.weight == 0
    assert members.windows[3].total == counted
    torch.testing.assert_close(gradient_of(members.models[3]), before)
