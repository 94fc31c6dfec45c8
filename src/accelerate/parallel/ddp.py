"""Data parallelism: a copy of the model on every process, gradients averaged by torch's DDP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..config.plugins import DistributedDataParallelKwargs
from ..runtime.device import ddp_device_ids
from ..runtime.runtime import Runtime
from .base import Capabilities, Strategy


class DataParallel(Strategy):
    """Train copies that stay equal because every process applies the same averaged gradients."""

    capabilities = Capabilities(defers_sync=True)

    def __init__(self, runtime: Runtime, handler: DistributedDataParallelKwargs | None = None) -> None:
        super().__init__(runtime)
        self.handler = handler

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap a model in DDP, unless nothing in it is trained."""
        if not any(param.requires_grad for param in model.parameters()):
            return model
        options = self.handler.to_kwargs() if self.handler is not None else {}
        device_ids = ddp_device_ids(self.runtime.device)
        wrapped = DistributedDataParallel(model, device_ids=device_ids, **options)
        if self.handler is not None:
            self.handler.register_comm_hook(wrapped)
        return wrapped

    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """Leave gradients unreduced inside the context."""
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()

    def resume_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """Reduce gradients in the next backward pass although its forward pass ran in `no_sync`."""
        return _resumed(model) if isinstance(model, DistributedDataParallel) else nullcontext()


@contextmanager
def _resumed(model: DistributedDataParallel) -> Iterator[None]:
    """Arm the reducer, which DDP does only in forward passes that will synchronise."""
    before = (model.require_backward_grad_sync, model.require_forward_param_sync)
    model.require_backward_grad_sync = True
    model.require_forward_param_sync = True
    model.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        model.require_backward_grad_sync, model.require_forward_param_sync = before
