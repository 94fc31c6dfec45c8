"""Average the gradients that no engine reduces: of modules that stay whole beside sharded ones, or on demand.

[Note: averaging twice] An average over processes is linear, and a gradient that is equal on all of them is its own
average. So a gradient may be averaged again after more was added to it: accumulation needs no record of what has been
averaged already.
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
"""Elements that travel in one all-reduce: enough to use the network, few enough to copy."""


@torch.no_grad()
def average_gradients(params: Iterable[Tensor], group: Any = None) -> None:
    """Average gradients over a group of processes, in as few collectives as possible.

    A parameter that only some processes used has a gradient of zero on the others; one that nobody used stays without.
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
    used = pieces[0].new_tensor([float(gradient is not None) for gradient in own])
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
    """Give every process of a group the values that the first one has."""
    for param in params:
        for tensor in _memories(local(param.detach())):
            value = tensor.to(device)  # it may wait on the host, where not every group works
            dist.broadcast(value, group=group, group_src=0)
            tensor.copy_(value)


def _memories(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors of which a quantised one consists."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _memories(getattr(tensor, name))


class UnshardedParameters:
    """The parameters of modules that stay whole beside sharded ones: equal at first, and kept equal.

    Their gradients are averaged at the end of every backward pass that reaches one of them, unless that is put off. See
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
            param.requires_grad_(True)  # frozen ones may train later, and a hook wants to be asked for now
            param.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            param.requires_grad_(trains)

    def _note(self, param: Tensor) -> None:
        if self._averages:
            self._is_due = True
            # By every parameter: the mark may be left over from a backward pass that failed.
            Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        if self._is_due:
            self._is_due = False
            average_gradients(self.params, self.group)

    @contextmanager
    def averaging(self, averages: bool) -> Iterator[None]:
        """Average gradients in the backward passes inside the context, or leave them as they are."""
        before, self._averages = self._averages, averages
        try:
            yield
        finally:
            self._averages = before
