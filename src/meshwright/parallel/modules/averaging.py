"""Average gradients that no engine reduces: those of unsharded modules in a sharded model, or on demand.

[Note: averaging twice] Averaging over processes is linear, and a gradient that is equal on all processes is its own
average. So a gradient may be averaged again after more was added to it, and accumulation need not track what has been
averaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from .dtensors import dtensor_like, local

_BUCKET = 25_000_000
"""Elements per all-reduce: enough to use the bandwidth, few enough to copy."""


@torch.no_grad()
def average_gradients(params: Iterable[Tensor], group: Any = None) -> None:
    """Average gradients over a group of processes, in as few collectives as possible.

    A parameter that only some processes used has a zero gradient on the others; one that no process used gets none.
    """
    by_form: dict[Any, list[Tensor]] = {}
    for param in params:
        if param.grad is not None and param.grad.is_sparse:
            param.grad = _averaged(param.grad.coalesce(), group)
        elif param.requires_grad:
            by_form.setdefault((param.dtype, local(param).device), []).append(param)
    for alike in by_form.values():
        for bucket in _buckets(alike):
            _average_bucket(bucket, group)


def _buckets(params: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for param in params:
        bucket.append(param)
        size += local(param).numel()
        if size >= _BUCKET:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _average_bucket(params: Sequence[Tensor], group: Any) -> None:
    own = [None if param.grad is None else local(param.grad) for param in params]
    pieces = [
        torch.zeros_like(local(param)) if gradient is None else gradient
        for param, gradient in zip(params, own, strict=True)
    ]
    used = pieces[0].new_ones(len(own))  # filled there: the device would be waited for to copy a list
    for index, gradient in enumerate(own):
        if gradient is None:
            used[index].zero_()
    flat = _averaged(torch.cat([*(piece.reshape(-1) for piece in pieces), used]), group)
    *averages, used = torch.split(flat, [*(piece.numel() for piece in pieces), len(pieces)])
    for param, gradient, average, users in zip(params, own, averages, used, strict=True):
        if gradient is not None:
            gradient.copy_(average.view_as(gradient))
        elif users > 0:
            param.grad = dtensor_like(param, average.view_as(local(param)).clone())


def _averaged(tensor: Tensor, group: Any) -> Tensor:
    tensor = tensor / dist.get_world_size(group)  # before the sum, which could overflow
    dist.all_reduce(tensor, group=group)
    return tensor


@torch.no_grad()
def broadcast_parameters(params: Iterable[Tensor], group: Any, device: torch.device) -> None:
    """Broadcast parameters from the first rank of a group."""
    for param in params:
        for tensor in _inner_tensors(local(param.detach())):
            value = tensor.to(device)  # it may be offloaded to the host, where not every backend works
            dist.broadcast(value, group=group, group_src=0)
            tensor.copy_(value)


def _inner_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors inside a tensor subclass, such as a quantised one."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _inner_tensors(getattr(tensor, name))


class UnshardedParameters:
    """Unsharded parameters of a sharded model: broadcast once, and kept equal by averaging gradients.

    Gradients are averaged at the end of every backward pass that reaches one of them, unless deferred. See
    [Note: averaging twice].
    """

    def __init__(self, params: Iterable[torch.nn.Parameter], group: Any, device: torch.device) -> None:
        self.params = list(params)
        self.group = group
        self._averages = True
        self._is_due = False
        broadcast_parameters(self.params, group, device)
        for param in self.params:
            if not param.is_floating_point() and not param.is_complex():
                continue  # quantised: it will never train
            trains = param.requires_grad
            param.requires_grad_(True)  # a hook needs it, and frozen parameters may be trained later
            param.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            param.requires_grad_(trains)

    def _on_gradient(self, param: Tensor) -> None:
        if self._averages:
            self._is_due = True
            # For every parameter: the flag may be left over from a failed backward pass.
            Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        if self._is_due:
            self._is_due = False
            average_gradients(self.params, self.group)

    @contextmanager
    def averaging(self, averages: bool) -> Iterator[None]:
        """Enable or disable averaging for the backward passes inside the context."""
        before, self._averages = self._averages, averages
        try:
            yield
        finally:
            self._averages = before
