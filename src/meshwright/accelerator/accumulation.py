"""The accumulation window: which micro-batches add up to a step, and what their gradients are divided by."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..data.loaders.elastic import ElasticLoader
from ..parallel.base import Strategy
from ..runtime.devices.device import number_on
from ..runtime.loop.gradient_state import GradientState

if TYPE_CHECKING:
    from ..parallel.replicas.surviving import SurvivingReplicas


class AccumulationWindow:
    """Count micro-batches, and normalise losses that were given as sums over items.

    [Note: losses per item] A window's gradients must be G = sum of all losses / number of all items, over every
    micro-batch and every process, while the engine averages over `shares` processes. A window of one micro-batch
    scales its loss by shares / items before the backward pass, and no gradient is touched. In a longer window the
    count is complete only with the last micro-batch: losses are first divided by `reference`, a fixed power of two
    near the usual count, which keeps fp16 in range and is exact in binary; after the last backward pass the gradients
    are multiplied once by shares * reference / items. The counts are summed in one scalar all-reduce per window.
    """

    counts_first = True
    """A window of one micro-batch counts its items before the backward pass."""

    def __init__(self, gradient_state: GradientState, strategy: Strategy, prepared_models: list[nn.Module]) -> None:
        self.gradient_state = gradient_state
        self.strategy = strategy
        self.step = 0
        self.unsynced = 0
        """How many `no_sync` contexts of the script are open."""
        self._defers_sync = strategy.capabilities.defers_sync
        self._prepared_models = prepared_models
        self._reference: float | None = None
        self.reset()

    def reset(self) -> None:
        """Forget a window that was begun, and its models."""
        self.step = 0
        self._models: tuple[nn.Module, ...] = ()
        self._items: Tensor | None = None
        self._items_came_at = -1
        self._has_mean_loss = False

    def micro_batch(self, models: tuple[nn.Module, ...]) -> AbstractContextManager[object]:
        """Begin the next micro-batch; in the context, gradients stay on this process unless it closes the window."""
        state = self.gradient_state
        if state.end_of_dataloader and state.sync_with_dataloader:
            self.step = 0
            closes = True
        else:
            self.step += 1
            closes = self.step % state.num_steps == 0
        state.sync_gradients = closes
        self._models = models
        if closes or not self._defers_sync or state.sync_each_batch:
            return _SYNCHRONISING
        return self.strategy.no_sync(models[0]) if len(models) == 1 else _none_synchronising(self.strategy, models)

    def share_of_mean(self, loss: Tensor) -> Tensor:
        """Return what a mean loss adds to its window; a window cannot mix it with sums over items."""
        if self._items is not None:
            raise _mixed_window_error()
        state = self.gradient_state
        self._has_mean_loss = not state.sync_gradients
        num_steps = state.num_steps
        return loss / num_steps if num_steps > 1 else loss

    @contextmanager
    def per_item(self, num_items: int | Tensor, device: torch.device) -> Iterator[Tensor]:
        """Yield what to multiply summed losses by before their backward passes, which run in the context.

        See [Note: losses per item].
        """
        if self._has_mean_loss:
            raise _mixed_window_error()
        items = number_on(device, num_items).detach()
        state = self.gradient_state
        if state.sync_gradients and self._items is None and self.counts_first:
            yield self._shares / self._total(items)
            return

        if self._items is not None and self._items_came_at == self.step and self._models:
            raise ValueError(
                "backward(num_items=...) was called twice for one accumulating micro-batch, so it is not known which "
                "items belong to which gradients: add the losses and the counts, and call it once."
            )
        reference = self._agreed_reference(items)
        self._items = items if self._items is None else self._items + items
        self._items_came_at = self.step
        yield number_on(device, 1 / reference)
        if state.sync_gradients:
            factor = self._shares * reference / self._total(self._items)
            self._items = None
            self.strategy.scale_gradients(self._models or self._prepared_models, factor)

    @property
    def _shares(self) -> int:
        return self.strategy.num_gradient_shares

    def _total(self, items: Tensor) -> Tensor:
        """Sum the counts of all processes; a window without any item has zero gradients, not NaNs."""
        total = items.clone()
        if self._shares > 1:
            dist.all_reduce(total, group=self.strategy.gradient_group)
        return total.clamp(min=1)

    def _agreed_reference(self, items: Tensor) -> float:
        """Return the power of two nearest to the usual count, agreed once by all processes."""
        if self._reference is None:
            usual = self._total(items).item() / self._shares
            self._reference = 2.0 ** round(math.log2(max(usual, 1.0)))
        return self._reference


class ElasticWindow(AccumulationWindow):
    """A window of samples that are assigned to members that come and go.

    It closes where the active loader says so, with or without `accumulate()`: [Note: elastic epochs] in
    `data/order/elastic.py`. A micro-batch with n samples of a nominal share of B weighs n / B, because the engine
    divides the sum of gradients by the nominal number of members. Items are counted after the last backward pass, when
    no more micro-batches can come.
    """

    counts_first = False
    _began_at = 0
    """The value of `step` at the beginning of the open window."""

    def micro_batch(self, models: tuple[nn.Module, ...]) -> AbstractContextManager[object]:
        """Begin the next micro-batch, as its loader assigned it."""
        loader = self._follow_loader()
        if loader is None:
            return super().micro_batch(models)
        self._models = models
        self._items_came_at = -1
        num_steps = self.gradient_state.num_steps
        if loader.begins_window:
            self._began_at = self.step - self.step % num_steps
        if self.gradient_state.sync_gradients:
            self.step = 0 if loader.end_of_dataloader else self._began_at + num_steps
            return _SYNCHRONISING
        self.step = min(self.step + 1, self._began_at + num_steps - 1)  # a loss adds micro-batches that do not count
        return _none_synchronising(self.strategy, models)

    def share_of_mean(self, loss: Tensor) -> Tensor:
        """Return what a mean loss adds to its window, by the weight of its micro-batch."""
        loader = self._follow_loader()
        share = super().share_of_mean(loss)
        return share if loader is None or loader.weight == 1 else share * loader.weight

    @contextmanager
    def per_item(self, num_items: int | Tensor, device: torch.device) -> Iterator[Tensor]:
        """Yield what to multiply summed losses by; 0 for a micro-batch without samples of this member."""
        loader = self._follow_loader()
        is_empty = loader is not None and loader.weight == 0
        with super().per_item(0 if is_empty else num_items, device) as factor:
            self._replicas.items = self._items
            yield factor * 0 if is_empty else factor

    @property
    def _replicas(self) -> SurvivingReplicas:
        return cast("SurvivingReplicas", self.strategy)

    def _total(self, items: Tensor) -> Tensor:
        """Return the count that was summed together with the gradients; of a step that was copied, nothing is left."""
        total = self._replicas.total_items
        return items.new_tensor(self._shares) if total is None else total.clamp(min=1)

    def _agreed_reference(self, items: Tensor) -> float:
        return 1.0  # a collective of its own would not be part of the step's transaction

    def _follow_loader(self) -> ElasticLoader | None:
        """Let the active loader say whether this micro-batch closes the window; return the loader if it is elastic."""
        loader = self.gradient_state.active_dataloader
        if not isinstance(loader, ElasticLoader) or loader.elastic is None:
            return None
        loader.elastic.trains = True
        self.gradient_state.sync_gradients = loader.closes_window
        return loader


def window_of(state: GradientState, strategy: Strategy, prepared_models: list[nn.Module]) -> AccumulationWindow:
    """Return the window of a strategy: where the members of a run change, its loaders tell when it closes."""
    kind = AccumulationWindow if strategy.runtime.member is None else ElasticWindow
    return kind(state, strategy, prepared_models)


_SYNCHRONISING = nullcontext()


@contextmanager
def _none_synchronising(strategy: Strategy, models: tuple[nn.Module, ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(strategy.no_sync(model))
        yield


def _mixed_window_error() -> ValueError:
    return ValueError(
        "One accumulation window has losses with num_items and without: a sum over items and a mean cannot be "
        "divided by the same count. Give num_items with every backward() of the window, or with none."
    )
