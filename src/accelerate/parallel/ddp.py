"""Data parallelism: a replica of the model on every process, with gradients averaged by torch's DDP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..config.plugins.handlers import DistributedDataParallelKwargs
from ..runtime.devices.device import ddp_device_ids
from ..runtime.group.runtime import Runtime
from .base import Capabilities, Strategy
from .modules.averaging import average_gradients
from .modules.dtensors import require_plain


class DataParallel(Strategy):
    """Train replicas that stay equal because every process applies the same averaged gradients."""

    capabilities = Capabilities(defers_sync=True)

    def __init__(self, runtime: Runtime, handler: DistributedDataParallelKwargs | None = None) -> None:
        super().__init__(runtime)
        self.handler = handler
        # Models with `static_graph` whose graph DDP has not recorded yet.
        self._awaiting_static_graph: WeakSet[nn.Module] = WeakSet()

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap a model in DDP, unless no parameter requires gradients."""
        if not any(param.requires_grad for param in model.parameters()):
            return model
        require_plain(model)
        options = self.handler.to_kwargs() if self.handler is not None else {}
        device_ids = ddp_device_ids(self.runtime.device)
        wrapped = DistributedDataParallel(model, device_ids=device_ids, **options)
        if self.handler is not None:
            self.handler.register_comm_hook(wrapped)
        if wrapped.static_graph:
            self._await_first_forward(wrapped)
        return wrapped

    def _await_first_forward(self, model: nn.Module) -> None:
        self._awaiting_static_graph.add(model)

        def note(*_: Any) -> None:
            if torch.is_grad_enabled():
                self._awaiting_static_graph.discard(model)
                hook.remove()

        hook = model.register_forward_hook(note)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """Skip gradient reduction inside the context.

        With `static_graph` the first backward pass is still reduced, because DDP records the graph in it. That does not
        change the result: see [Note: averaging twice] in `averaging.py`.
        """
        if not isinstance(model, DistributedDataParallel) or model in self._awaiting_static_graph:
            return nullcontext()
        return model.no_sync()

    def resume_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """Average gradients at the end of the context, although the forward pass ran in `no_sync`.

        DDP's reducer must know before the backward pass which parameters the forward pass used, so it cannot do this.
        """
        return _averaging_on_exit(model) if isinstance(model, DistributedDataParallel) else nullcontext()


@contextmanager
def _averaging_on_exit(model: nn.Module) -> Iterator[None]:
    yield
    average_gradients(model.parameters())
