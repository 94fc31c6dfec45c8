"""The accumulation window: which micro-batches add up to a step, and what their gradients are divided by."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..parallel.base import Strategy
from ..runtime.loop.gradient_state import GradientState


class AccumulationWindow:
    """Count micro-batches, and normalise losses that were given as sums over items.

    [Note: losses per item] A window's gradients must be G = sum of all losses / number of all items, over every
    micro-batch and every process, while the engine averages over `shares` processes. A window of one micro-batch
    scales its loss by shares / items before the backward pass, and no gradient is touched. In a longer window the
    count is complete only with the last micro-batch: losses are first divided by `reference`, a fixed power of two
    near the usual count, which keeps fp16 in range and is exact in binary; after the last backward pass the gradients
    are multiplied once by shares * reference / items. The counts meet in one scalar all-reduce per window.
    """

    def __init__(self, gradient_state: GradientState, strategy: Strategy, prepared_models: list[nn.Module]) -> None:
        self.gradient_state = gradient_state
        self.strategy = strategy
        self.step = 0
        self._defers_sync = strategy.capabilities.defers_sync
        self._prepared_models = prepared_models
        self._models: tuple[nn.Module, ...] = ()
        self._reference: float | None = None
        self.reset()

    def reset(self) -> None:
        """Forget a window that was begun."""
        self.step = 0
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
        items = torch.as_tensor(num_items, device=device).detach()
        closes = self.gradient_state.sync_gradients
        if closes and self._items is None:
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
        yield torch.tensor(1 / reference, device=device)
        if closes:
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
