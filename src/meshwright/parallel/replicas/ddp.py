"""Data parallelism: a replica of the model on every process, with gradients averaged by torch's DDP."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...config.plugins.handlers import DistributedDataParallelKwargs
from ...config.plugins.parallelism import AXES, ParallelismConfig
from ...config.plugins.sharding import FullyShardedDataParallelPlugin
from ...runtime.devices.device import ddp_device_ids
from ...runtime.group.runtime import Runtime
from ..base import Capabilities, Strategy
from ..modules.averaging import average_gradients
from ..modules.spread import DDP, FULLY_SHARD, REPLICATE, Layout, layout_of, rows_in_order

if TYPE_CHECKING:
    from ..mesh.sharded import MeshParallel


logger = logging.getLogger(__name__)


class DataParallel(Strategy):
    """Train replicas that stay equal because every process applies the same averaged gradients.

    A model that the user has wrapped in DDP, or sharded over all processes by `fully_shard`, is used as it is: its
    gradients are averaged over the same processes. Sharded models are left to `MeshParallel`.
    """

    capabilities = Capabilities(defers_sync=True)

    def __init__(self, runtime: Runtime, handler: DistributedDataParallelKwargs | None = None) -> None:
        super().__init__(runtime)
        self.handler = handler
        # Models with `static_graph` whose graph DDP has not recorded yet.
        self._awaiting_static_graph: WeakSet[nn.Module] = WeakSet()
        # Models that came sharded -> the strategy that trains them.
        self._sharded: MutableMapping[nn.Module, MeshParallel] = WeakKeyDictionary()
        # Models that came with `replicate`.
        self._replicated: WeakSet[nn.Module] = WeakSet()
        # Models in DDP.
        self._in_ddp: WeakSet[nn.Module] = WeakSet()

    # --- prepare ----------------------------------------------------------------------------------------------------

    @property
    def asks_for(self) -> str:
        """How this strategy spreads a model, in words."""
        return f"a copy of the model on each of {self.runtime.num_processes} processes (DDP over all ranks)"

    def fits(self, layout: Layout, model: nn.Module) -> bool:
        """Return whether the gradients of a model are averaged over all processes already, or it has none."""
        if layout.oddity or layout.splits:
            return False
        if layout.by in (DDP, REPLICATE):
            return set(layout.copies) == set(range(self.runtime.num_processes))
        if layout.by == FULLY_SHARD:
            sizes = max(len(layout.copies), 1), max(len(layout.shards), 1)
            rows = rows_in_order(self.runtime.process_index, *sizes)
            return math.prod(sizes) == self.runtime.num_processes and rows == (layout.copies, layout.shards)
        return not any(param.requires_grad for param in model.parameters())

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap a model in DDP, unless no parameter requires gradients or they are averaged already."""
        layout = layout_of(model)
        if layout.by == FULLY_SHARD:
            return self._keep_sharded(model, layout)
        if not any(param.requires_grad for param in model.parameters()):
            return model
        if layout.by:
            return self._keep_wrapped(model, layout)
        options = self.handler.to_kwargs() if self.handler is not None else {}
        device_ids = ddp_device_ids(self.runtime.device)
        wrapped = DistributedDataParallel(model, device_ids=device_ids, **options)
        if self.handler is not None:
            self.handler.register_comm_hook(wrapped)
        self._note_forward_passes(wrapped)
        if wrapped.static_graph:
            self._await_first_forward(wrapped)
        return wrapped

    def _keep_wrapped(self, model: nn.Module, layout: Layout) -> nn.Module:
        if self.handler is not None and self.runtime.is_main_process:
            logger.warning("DistributedDataParallelKwargs has no effect: the model came in %s already.", layout.by)
        if layout.by == REPLICATE:
            self._replicated.add(model)
        if isinstance(model, DistributedDataParallel):
            self._note_forward_passes(model)
        if getattr(model, "static_graph", False):
            self._await_first_forward(model)
        return model

    def _keep_sharded(self, model: nn.Module, layout: Layout) -> nn.Module:
        """Train a model in the shards that it has; the mesh is that of its own `fully_shard` calls."""
        from ...runtime.group.mesh import Mesh
        from ..mesh.sharded import MeshParallel

        sizes = {f"{axis}_size": 1 for axis in (*AXES, "ep")}
        sizes |= {"dp_replicate_size": max(len(layout.copies), 1), "dp_shard_size": max(len(layout.shards), 1)}
        mesh = Mesh.of(ParallelismConfig(**sizes), self.runtime)  # type: ignore[arg-type]
        self._sharded[model] = MeshParallel(self.runtime, mesh, FullyShardedDataParallelPlugin())
        return self._sharded[model].wrap(model)

    def _rebind(self, optimizer: torch.optim.Optimizer) -> None:
        super()._rebind(optimizer)
        for strategy in self._sharded.values():
            strategy._rebind(optimizer)

    def _await_first_forward(self, model: nn.Module) -> None:
        self._awaiting_static_graph.add(model)

        def note(*_: Any) -> None:
            if torch.is_grad_enabled():
                self._awaiting_static_graph.discard(model)
                hook.remove()

        hook = model.register_forward_hook(note)

    def _note_forward_passes(self, model: nn.Module) -> None:
        if model not in self._in_ddp:
            self._in_ddp.add(model)
            model.register_forward_hook(_note_forward_pass)

    # --- the step ---------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run a backward pass whose gradients are averaged, also one that no forward pass precedes.

        DDP reduces in the first backward pass after a forward pass only. Two losses of one output, or two outputs that
        were computed before the first backward pass, would leave the gradients of the second on each process.
        """
        noted = {model: model.__dict__.get(_RAN_FORWARD) for model in self._in_ddp}
        is_plain = len(noted) < 2 and False not in noted.values()  # one model, whose forward pass came before
        before = {} if is_plain else {model: _versions(model) for model, ran in noted.items() if ran is not None}
        super().backward(loss, **options)
        for model, ran_forward in noted.items():
            if ran_forward is None or (model in before and not _has_changed(model, before[model])):
                continue  # it runs compiled, or this pass did not reach it
            if ran_forward:
                model.__dict__[_RAN_FORWARD] = False  # and DDP has reduced its gradients
            elif model.require_backward_grad_sync:
                left_out: Any = model.parameters_to_ignore
                own: Any = model.module
                average_gradients(param for name, param in own.named_parameters() if name not in left_out)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """Skip gradient reduction inside the context.

        With `static_graph` the first backward pass is still reduced, because DDP records the graph in it. That does not
        change the result: see [Note: averaging twice] in `averaging.py`.
        """
        if model in self._sharded:
            return self._sharded[model].no_sync(model)
        if model in self._awaiting_static_graph:
            return nullcontext()
        if isinstance(model, DistributedDataParallel):
            return model.no_sync()
        return _not_synchronising(model) if model in self._replicated else nullcontext()

    def resume_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """Average gradients at the end of the context, although the forward pass ran in `no_sync`.

        DDP's reducer must know before the backward pass which parameters the forward pass used, so it cannot do this.
        """
        if model in self._sharded:
            return self._sharded[model].resume_sync(model)
        averages = isinstance(model, DistributedDataParallel) or model in self._replicated
        return _averaging_on_exit(model) if averages else nullcontext()

    def objection_to_early_steps(self, params: Sequence[Tensor]) -> str | None:
        """Refuse with DDP, whose buckets are not freed; leave models that came sharded to the mesh."""
        for strategy in self._sharded.values():
            return strategy.objection_to_early_steps(params)
        return (
            "DDP averages gradients in buckets, which hold all of them at any time: nothing would be freed. "
            "DistributedDataParallelKwargs(gradient_as_bucket_view=True) spares the second copy of gradients."
        )

    @property
    def replicas(self) -> tuple[Sequence[int], Any]:
        """All ranks, unless a model came sharded."""
        return ((), None) if self._sharded else (range(self.runtime.num_processes), None)

    def clip_grad_norm(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float) -> Tensor:
        """Clip gradients by their norm, over all shards if there are any; return the norm before clipping."""
        for strategy in self._sharded.values():
            return strategy.clip_grad_norm(self.current(parameters), max_norm, norm_type)
        return super().clip_grad_norm(parameters, max_norm, norm_type)

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def saves_shards(self) -> bool:
        """Return whether checkpoints hold shards, because a model came sharded."""
        return bool(self._sharded)

    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the full state dict of a model; of a sharded one, only the main process gets it."""
        strategy = self._sharded.get(model)
        return super().full_state_dict(model) if strategy is None else strategy.full_state_dict(model)


_RAN_FORWARD = "_accelerate_ran_forward"
"""Whether a model in DDP ran forward since the last backward pass; missing where it runs compiled."""


def _note_forward_pass(model: nn.Module, *_: Any) -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        model.__dict__[_RAN_FORWARD] = True


def _versions(model: nn.Module) -> list[tuple[Tensor | None, int]]:
    """Return the gradients, and what changes when something is added to one."""
    return [(param.grad, 0 if param.grad is None else param.grad._version) for param in model.parameters()]


def _has_changed(model: nn.Module, before: Sequence[tuple[Tensor | None, int]]) -> bool:
    pairs = zip(_versions(model), before, strict=True)
    return any(new is not old or version != earlier for (new, version), (old, earlier) in pairs)


@contextmanager
def _not_synchronising(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


@contextmanager
def _averaging_on_exit(model: nn.Module) -> Iterator[None]:
    yield
    average_gradients(model.parameters())
