"""A stand-in for DistributedDataParallel, whose reducer is C++ and needs data: the same buckets and collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..trace import COMMUNICATION, Collective
from .recorder import TraceRecorder

REDUCE_STREAM = "reduce"
_MEBIBYTE = 1024 * 1024


def replace_ddp(recorder: TraceRecorder) -> None:
    """Make every replica of this process a stand-in."""
    from ....parallel.replicas import ddp

    class Replica(PlannedReplica):
        def __init__(self, module: nn.Module, *args: Any, **options: Any) -> None:
            super().__init__(recorder, module, **options)

    torch.nn.parallel.DistributedDataParallel = Replica  # type: ignore[misc]
    ddp.DistributedDataParallel = Replica  # type: ignore[attr-defined]


class PlannedReplica(DistributedDataParallel):
    """Average gradients in buckets as DDP does, on fake tensors."""

    def __init__(
        self,
        recorder: TraceRecorder,
        module: nn.Module,
        *,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        broadcast_buffers: bool = True,
        process_group: Any = None,
        **ignored: Any,
    ) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.static_graph = static_graph
        self.require_backward_grad_sync = True
        self.device_ids = self.output_device = None
        self.process_group = process_group or dist.group.WORLD  # type: ignore[assignment]
        self._recorder = recorder
        self._views = gradient_as_bucket_view
        self._buffers_too = broadcast_buffers
        params = [param for param in module.parameters() if param.requires_grad]
        sizes = [_MEBIBYTE, int((bucket_cap_mb or 25) * _MEBIBYTE)]
        self._buckets = _buckets(params[::-1], sizes)
        with recorder.labelled(owner=COMMUNICATION):
            self._flat = [
                torch.zeros(sum(p.numel() for p in bucket), dtype=bucket[0].dtype) for bucket in self._buckets
            ]
        self._bucket_of = {param: index for index, bucket in enumerate(self._buckets) for param in bucket}
        self._missing: list[int] = []
        self._reductions: list[Collective] = []
        for param in params:
            param.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the replica; the gradients of the next backward pass are averaged unless `no_sync` is on."""
        if self._buffers_too and self.require_backward_grad_sync and torch.is_grad_enabled():
            for buffer in self.module.buffers():
                dist.broadcast(buffer, 0, group=self.process_group)
        self._missing = [len(bucket) for bucket in self._buckets]
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging them."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def _arrived(self, param: Tensor) -> None:
        if not self.require_backward_grad_sync or not self._missing:
            return
        index = self._bucket_of[param]  # type: ignore[index]
        assert param.grad is not None
        if not self._views:
            self._flat[index][: param.numel()].copy_(param.grad.reshape(-1))
        self._missing[index] -= 1
        if self._missing[index] == 0:
            self._reduce(index)

    def _reduce(self, index: int) -> None:
        recorder = self._recorder
        with recorder.labelled(stream=REDUCE_STREAM):
            dist.all_reduce(self._flat[index], group=self.process_group)
        self._reductions.append(recorder.trace.collectives[-1])
        if any(self._missing):
            return
        recorder.wait(self._reductions)
        self._reductions.clear()
        for bucket, flat in zip(self._buckets, self._flat, strict=True):
            for param in bucket:
                if not self._views and param.grad is not None:
                    param.grad.copy_(flat[: param.numel()].view_as(param))


def _buckets(params: list[nn.Parameter], sizes: list[int]) -> list[list[nn.Parameter]]:
    """Fill buckets of one dtype in the order in which gradients arrive; the first is small."""
    done: list[list[nn.Parameter]] = []
    filling: dict[torch.dtype, list[nn.Parameter]] = {}
    count: dict[torch.dtype, int] = {}
    for param in params:
        bucket = filling.setdefault(param.dtype, [])
        bucket.append(param)
        limit = sizes[min(count.get(param.dtype, 0), len(sizes) - 1)]
        if sum(p.numel() * p.element_size() for p in bucket) >= limit:
            done.append(filling.pop(param.dtype))
            count[param.dtype] = count.get(param.dtype, 0) + 1
    return done + list(filling.values())
