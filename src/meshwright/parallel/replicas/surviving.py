"""Data parallelism whose replicas may be lost and replaced: gradients are reduced as a transaction."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...errors import ReplicaMismatchError, UnsupportedSettingError
from ...program import program_name
from ...runtime.collectives.operations import all_gather_single, sendable
from ...runtime.group.runtime import Runtime
from ...runtime.loop.gradient_state import GradientState
from ...runtime.membership.member import Member
from ..base import Capabilities, Strategy
from .checksums import difference
from .reducer import GradientReducer


class SurvivingReplicas(Strategy):
    """Train replicas of a model; the loss of one does not end the others.

    Every process keeps its own gradients until those of the whole step were reduced. What happens when they were not
    is decided in `recovery.py`.
    """

    capabilities = Capabilities(defers_sync=True)

    def __init__(self, runtime: Runtime, member: Member, *sharding: Any) -> None:
        super().__init__(runtime, *sharding)
        self.member = member
        self.reducers: list[GradientReducer] = []
        # Set by `Recovery` and `Joining`.
        self.begin_closing: Callable[[], bool] = lambda: True
        self.close_step: Callable[[], None] | None = None
        self.between_steps: Callable[[], None] | None = None
        self.has_open_gradients = False
        """Gradients were computed that no step has used."""
        self.items: Tensor | None = None
        """How many items the losses of the open window sum over on this process; None for mean losses."""
        self.total_items: Tensor | None = None
        """The same over all members, for the step that was reduced last."""
        self.compares_every: int | None = None
        """After how many steps the members compare their parameters; None for never."""
        self._compares_now = False
        self.models: list[nn.Module] = []
        """Those that are compared."""
        self._is_deferred = False
        self._loader_numbers = count()

    @property
    def asks_for(self) -> str:
        """How this strategy spreads a model, in words."""
        return f"a copy of the model on each of {self.member.replicas} replicas ({program_name()} launch --survive)"

    def objection_to_early_steps(self, params: Sequence[Tensor]) -> str:
        """Refuse: a step is made after all replicas have agreed on it."""
        return "a step under --survive takes place on all replicas or on none, after the backward pass."

    def wrap(self, model: nn.Module) -> nn.Module:
        """Give all replicas the weights of the first one, and collect the gradients of a model."""
        self.models.append(model)
        if not any(param.requires_grad for param in model.parameters()):
            return model
        refuse_running_statistics(model)
        if self.runtime.num_processes > 1:
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(sendable(tensor.detach()), src=0)
        self._add_reducer(GradientReducer(model.parameters()))
        return model

    def _add_reducer(self, reducer: GradientReducer) -> None:
        self.reducers.append(reducer)
        self.bind_to_new_group()

    def bind_to_new_group(self) -> None:
        """Reduce over the process group of the present members from now on."""
        for reducer in self.reducers:
            reducer.bind(self.counterparts, self.member.count_replicas(self.member.replicas))

    @property
    def counterparts(self) -> Any:
        """The group of the processes with the same parameters: all members."""
        return dist.group.WORLD

    def as_one(self) -> AbstractContextManager[object]:
        """Return a context that fails on all processes of a replica or on none: here a replica is one process."""
        return nullcontext()

    @property
    def num_data_ranks(self) -> int:
        """Return the number of replicas that the run was started with: a step consumes as many batches as then."""
        return self.member.replicas

    @property
    def data_rank(self) -> int:
        """Return the nominal rank."""
        return self.member.rank

    @property
    def num_gradient_shares(self) -> int:
        """Return the number that sums of gradients are divided by: that of the replicas at the start."""
        return self.member.replicas

    @property
    def replicas(self) -> tuple[Sequence[int], Any]:
        """The present members, by nominal rank."""
        return (self.member.members, None) if len(self.member.members) > 1 else ((), None)

    def connect_loader(self, loader: Any) -> None:
        """Let a loader assign samples to the members."""
        loader.make_elastic(self.member.members, self.member.rank)
        loader.elastic.before_window = self._before_window
        number = next(self._loader_numbers)
        loader.elastic.agree_on_seed = lambda seed: self._seed_of_epoch(number, loader, seed)

    def _seed_of_epoch(self, number: int, loader: Any, drawn: int) -> int:
        """Return the seed of an epoch: a function of the first one, because generators are lost with a member."""
        known = loader.elastic.first_seed  # if all members were restarted
        first = loader.elastic.first_seed = self.member.first(f"seed/{number}", drawn if known is None else known)
        digest = hashlib.sha256(f"{first},{loader.iteration}".encode()).digest()
        return int.from_bytes(digest[:7], "big")

    def _before_window(self) -> None:
        if self.between_steps is not None:
            self.between_steps()

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run the backward pass; if it closes the accumulation window, reduce the gradients."""
        closes = GradientState().sync_gradients and not self._is_deferred and self.begin_closing()
        for reducer in self.reducers:
            reducer.begin(closes)
        super().backward(loss, **options)
        self.has_open_gradients = True
        if closes and self.close_step is not None:
            self.close_step()

    def reduce(self, signal: float, *, number: int = 0, again: bool = False) -> float:
        """Reduce the gradients of a step on all members, or on none; return the sum of the signals.

        Raises the error of a collective, or `MembershipChanged`; every gradient is then as it was, and can be reduced
        `again` over another group.
        """
        self._compares_now = self.compares_every is not None and number > 0 and number % self.compares_every == 0
        total, items = self._sum(signal, again)
        for reducer in self.reducers:
            reducer.store()
        self.end_window(items)
        return total

    def _sum(self, signal: float, again: bool) -> tuple[float, Tensor | None]:
        """Complete the sums of gradients, and return those of the signals and of the items."""
        total = 0.0
        for reducer in self.reducers:
            reducer.signal = signal
            total += reducer.complete(self.member.wait, again=again)
        items = None if self.items is None else self.items.clone()
        if items is not None:
            self.member.wait(dist.all_reduce(items, group=self.counterparts, async_op=True))
        if self._compares_now:
            self._require_equal_replicas()
        return total, items

    def _require_equal_replicas(self) -> None:
        """Compare the parameters that the step began with; its gradients are used only if these are equal.

        A replica that differs from most is expelled, and the step is made without its gradients.
        """
        ranks = self.member.counterparts()

        def gather(numbers: Tensor) -> Tensor:
            everywhere = numbers.new_empty(len(ranks) * len(numbers))
            self.member.wait(all_gather_single(everywhere, numbers, group=self.counterparts, async_op=True))
            return everywhere

        found = difference(self.models, ranks, self.runtime.device, gather) if len(ranks) > 1 else None
        if found is None:
            return
        if not found.odd:
            raise ReplicaMismatchError(found.text)
        self.member.expel(found.odd, f"its parameters differ from those of the others in {found.tensors}")

    def end_window(self, total_items: Tensor | None) -> None:
        """Take note that the gradients of a window are complete."""
        self.has_open_gradients = False
        self.items, self.total_items = None, total_items

    def release_gradients(self) -> None:
        """Forget what this process alone has computed: the step is made."""
        for reducer in self.reducers:
            reducer.release()

    @contextmanager
    def _deferring(self) -> Iterator[None]:
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """Skip gradient reduction inside the context."""
        return self._deferring()


def refuse_running_statistics(model: nn.Module) -> None:
    """Refuse a model whose buffers change in training, differently on each replica."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats and module.training:
            raise UnsupportedSettingError(
                f"--survive with {type(module).__name__} ({name})",
                "its running statistics differ between replicas, and a replacement would go on with another's.",
                "Use GroupNorm or LayerNorm, or freeze the statistics with .eval().",
            )
