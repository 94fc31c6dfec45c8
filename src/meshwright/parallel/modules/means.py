"""Find the number of items that a loss averages over, from its autograd graph.

A mean of means is the overall mean only if every part has the same number of items, which losses over padded labels do
not have. The parts are micro-batches in a pipeline, and shards of sequences in context parallelism.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ...runtime.devices.device import has_streams, pinned_empty

_MAX_NODES = 32
_MEAN, _SUM = 1, 2  # torch's codes for the reduction of a loss


def divisors_of(loss: Tensor) -> list[Any]:
    """Return the divisors of a loss, or of the losses that it sums: tensors or plain numbers."""
    found: list[Any] = []
    waiting = [loss.grad_fn]
    for _ in range(_MAX_NODES):
        if not waiting:
            break
        node = waiting.pop(0)
        if node is None or any(len(output.shape) for output in node._input_metadata):
            continue  # not a scalar: what is below was not averaged yet
        divisor = _divisor(node)
        if divisor is None:
            waiting += [below for below, _ in node.next_functions]
        else:
            found.append(divisor)
    return found


def is_sum(loss: Tensor) -> bool:
    """Return whether a loss is a sum over its items."""
    node: Any = loss.grad_fn
    return node is not None and (node.name() == "SumBackward0" or getattr(node, "_saved_reduction", None) == _SUM)


def _divisor(node: Any) -> Any:
    if getattr(node, "_saved_reduction", None) == _MEAN:
        return node._saved_total_weight if hasattr(node, "_saved_total_weight") else node._saved_self.numel()
    if node.name() == "MeanBackward0":
        return node._saved_self_sym_numel
    if node.name() == "DivBackward0" and node._saved_other is not None and not node._saved_other.requires_grad:
        return node._saved_other
    return None


class LateNumbers:
    """Numbers of a device that the host reads once they have arrived: it never waits for them."""

    def __init__(self) -> None:
        self._sent: tuple[Tensor, torch.Event] | None = None

    def exchange(self, numbers: Tensor) -> list[float] | None:
        """Send numbers to the host, unless others are on their way; return what has arrived since the last call."""
        if not has_streams(numbers.device):
            return cast(list[float], numbers.tolist())
        arrived = None
        if self._sent is not None and self._sent[1].query():
            arrived, self._sent = self._sent[0].tolist(), None
        if self._sent is None:
            host = pinned_empty(numbers).copy_(numbers, non_blocking=True)
            self._sent = host, torch.accelerator.current_stream(numbers.device).record_event()
        return arrived
