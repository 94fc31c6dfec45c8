"""The accumulation window: which micro-batches add up to a step, and what their gradients are divided by."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .parallel.base import Strategy
from .runtime.gradient_state import GradientState


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

    def micro_batch(self, models: tuple[nn.Module, ...]) -> MicroBatch:
        """Return the context of one micro-batch of these models."""
        return MicroBatch(self, models)

    def advance(self, models: tuple[nn.Module, ...]) -> bool:
        """Begin the next micro-batch and tell whether it closes the window."""
        state = self.gradient_state
        if state.sync_with_dataloader and state.end_of_dataloader:
            self.step = 0
            closes = True
        else:
            self.step += 1
            closes = self.step % state.num_steps == 0
        state.sync_gradients = closes
        self._models = models
        return closes

    def note_mean_loss(self) -> None:
        """Take note of a loss that is a mean; a window cannot mix it with sums over items."""
        if self._items is not None:
            raise _mixed_window_error()
        self._has_mean_loss = not self.gradient_state.sync_gradients

    def backward_per_item(
        self,
        loss: Tensor,
        num_items: int | Tensor,
        scale: Callable[[Tensor], Tensor],
        backward_options: dict[str, Any],
    ) -> None:
        """Run the backward pass of a summed loss. See [Note: losses per item]."""
        if self._has_mean_loss:
            raise _mixed_window_error()
        items = torch.as_tensor(num_items, device=loss.device).detach()
        closes = self.gradient_state.sync_gradients
        if closes and self._items is None:
            factor = self._shares / self._total(items)
            scale(loss * factor.to(loss.dtype)).backward(**backward_options)  # type: ignore[no-untyped-call]
            return

        if self._items is not None and self._items_came_at == self.step and self._models:
            raise ValueError(
                "backward(num_items=...) was called twice for one accumulating micro-batch, so it is not known which "
                "items belong to which gradients: add the losses and the counts, and call it once."
            )
        reference = self._agreed_reference(items)
        self._items = items if self._items is None else self._items + items
        self._items_came_at = self.step
        scale(loss / reference).backward(**backward_options)  # type: ignore[no-untyped-call]
        if closes:
            factor = self._shares * reference / self._total(self._items)
            self._items = None
            _multiply_gradients(self._models or self._prepared_models, factor)

    @property
    def _shares(self) -> int:
        return self.strategy.num_gradient_shares

    def _total(self, items: Tensor) -> Tensor:
        """Sum the counts of all processes; a window without any item has zero gradients, not NaNs."""
        total = items.clone()
        if self._shares > 1:
            dist.all_reduce(total)
        return total.clamp(min=1)

    def _agreed_reference(self, items: Tensor) -> float:
        """Return the power of two nearest to the usual count, agreed once by all processes."""
        if self._reference is None:
            usual = self._total(items).item() / self._shares
            self._reference = 2.0 ** round(math.log2(max(usual, 1.0)))
        return self._reference


class MicroBatch:
    """The context of one micro-batch: gradients stay on this process unless it closes the window."""

    __slots__ = ("_deferred", "_models", "_window")

    def __init__(self, window: AccumulationWindow, models: tuple[nn.Module, ...]) -> None:
        self._window = window
        self._models = models
        self._deferred: ExitStack | None = None

    def __enter__(self) -> None:
        window = self._window
        closes = window.advance(self._models)
        if not closes and window.strategy.capabilities.defers_sync and not window.gradient_state.sync_each_batch:
            self._deferred = ExitStack()
            for model in self._models:
                self._deferred.enter_context(window.strategy.no_sync(model))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._deferred is not None:
            self._deferred.__exit__(kind, error, trace)
            self._deferred = None


def _multiply_gradients(models: Iterable[nn.Module], factor: Tensor) -> None:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for model in models:
        for param in model.parameters():
            if param.grad is not None:
                by_dtype.setdefault(param.grad.dtype, []).append(param.grad)
    for dtype, gradients in by_dtype.items():
        torch._foreach_mul_(gradients, factor.to(dtype))


def _mixed_window_error() -> ValueError:
    return ValueError(
        "One accumulation window has losses with num_items and without: a sum over items and a mean cannot be "
        "divided by the same count. Give num_items with every backward() of the window, or with none."
    )
