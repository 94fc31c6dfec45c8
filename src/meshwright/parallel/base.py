"""The interface of parallelism strategies: `Strategy`, its `Capabilities`, and the `Bundle` it prepares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..precision.quantized import save_and_load_quantized
from ..runtime.collectives.nested import recursively_apply
from ..runtime.group.runtime import Runtime
from ..runtime.modules import owner_of
from .modules.dtensors import local
from .modules.gradient_hooks import carry_hooks
from .modules.references import Rebinding, optimizers_in
from .modules.spread import Layout, Ranks, layout_of, refuse, warn_of_splits


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Features of a strategy that the façade queries instead of its class."""

    defers_sync: bool = False
    """Gradients can be accumulated without being reduced (`no_sync`)."""
    owns_scaling: bool = False
    """The engine scales fp16 losses itself."""
    compiles_inside: bool = False
    """`torch.compile` is applied in place to the model inside the wrapper."""


@dataclass(kw_only=True)
class Bundle:
    """The objects of one `prepare` call that a strategy works on."""

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)
    """Samples per process and micro-batch, for every loader known so far."""
    accumulation_steps: int = 1
    """Micro-batches per step."""
    split_batches: bool = False
    """A batch of the plain loader is a global batch, so that a step consumes one."""
    place_models: list[bool] = field(default_factory=list)
    """For each model, whether to move it to the device."""
    evaluation: bool = False
    """The models are not trained, so nothing is synchronised."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The arguments of one `forward_backward` call: the model's inputs, and how to compute the loss."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any = None
    loss_fn: Callable[..., Tensor] | None = None
    num_items: int | Tensor | None = None
    """The number of items that the loss sums over; None for a mean."""

    def loss_of(self, outputs: Any, target: Any) -> Tensor:
        """Return the loss: from `loss_fn`, or the one that the model returned."""
        if self.loss_fn is not None:
            return self.loss_fn(outputs) if self.target is None else self.loss_fn(outputs, target)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if not isinstance(loss, Tensor):
            raise ValueError(
                f"forward_backward was given no loss_fn, and the model returned a {type(outputs).__name__} without a "
                "loss: give loss_fn=..., and target=... if it takes one."
            )
        return loss


Shares = AbstractContextManager[Callable[[Tensor], Tensor]]
"""A context for backward passes; it yields a function from a loss to the value that `backward` starts from."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps of sharding a model that other libraries replace; each takes a model and returns it."""

    recompute: Callable[[nn.Module], nn.Module]
    shard: Callable[[nn.Module], nn.Module]


FULL_STEPS = "_accelerate_full_steps"
"""The name under which an optimizer keeps its `FullSteps`; see mesh/matrices/stepping.py."""


class EngineState(ABC):
    """The state of a model and optimizer that an engine owns, as named trees of data."""

    @abstractmethod
    def capture(self) -> dict[str, Any]:
        """Return the files that this process saves, by name. Collective."""

    @abstractmethod
    def wanted(self, files: Sequence[str]) -> list[str]:
        """Select the saved files that this process must read."""

    @property
    @abstractmethod
    def classes(self) -> list[Any]:
        """The classes that the files hold besides plain data."""

    @abstractmethod
    def objection(self, states: Mapping[str, Any]) -> str | None:
        """Return why the loaded states do not fit, before anything is changed."""

    @abstractmethod
    def restore(self, states: Mapping[str, Any], folder: Path) -> None:
        """Restore the loaded states. Collective."""

    def companions(self) -> dict[str, str]:
        """Return small files, name -> text, to write next to the folder for other tools."""
        return {}


class StepTransaction(Protocol):
    """A step that takes place on all members of a run or on none."""

    def may_step(self) -> bool:
        """Return whether optimizers step now; False if the step was copied from another member."""

    def may_zero_grad(self) -> bool:
        """Return whether gradients are zeroed now; False if they belong to a step that is not made."""


_WEAK = (WeakSet, WeakKeyDictionary, WeakIdKeyDictionary)
"""Collections of weak references, which cannot be pickled and are empty in a copy."""


class Strategy(ABC):
    """A way to distribute models over the processes of a `Runtime`."""

    capabilities: Capabilities
    mesh: Any = None
    """The device mesh, if there is one."""
    steps: Steps | None = None
    """Replacements for the strategy's own sharding steps."""
    transaction: StepTransaction | None = None
    """What decides whether optimizers step, where the members of a run change."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        # A replaced parameter -> its replacement.
        self._successors: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()
        self._optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what cannot be pickled: weak references, and functions of the Accelerator."""
        weak = {name: type(value) for name, value in self.__dict__.items() if isinstance(value, _WEAK)}
        return {**self.__dict__, **weak, "steps": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(
            {name: value() if isinstance(value, type) and value in _WEAK else value for name, value in state.items()}
        )

    def admit(self, model: nn.Module, *, evaluation: bool = False) -> Layout:
        """Refuse a model that is already spread in another way than here; see [Note: already spread] in spread.py.

        A model for evaluation is used as it is; if its layers are split over processes that see different samples, a
        warning says so.
        """
        layout = layout_of(model)
        if evaluation:
            warn_of_splits(layout, model, self.split_ranks)
        elif layout.by and not self.fits(layout, model):
            refuse(layout, model, self.asks_for, self.runtime.process_index)
        return layout

    def fits(self, layout: Layout, model: nn.Module) -> bool:
        """Return whether a model that is already spread can be trained as it is."""
        return False

    @property
    def asks_for(self) -> str:
        """How this strategy spreads a model, in words."""
        return "a plain model"

    @property
    def split_ranks(self) -> Ranks:
        """The ranks over which layers are split, which see the same samples; empty if none are."""
        return ()

    def prepare(self, bundle: Bundle) -> Bundle:
        """Place and wrap the models, then bind the optimizers to their new parameters."""
        models = []
        for model, place in zip(bundle.models, bundle.place_models, strict=True):
            save_and_load_quantized(model)
            if place:
                (self._move if bundle.evaluation else self._place)(model)
            models.append(model if bundle.evaluation else self.wrap(model))
        self._optimizers.update(bundle.optimizers)
        for optimizer in self._optimizers:  # earlier ones too: their models may be prepared now
            self._rebind(optimizer)
        return replace(bundle, models=models)

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model in the form that is trained."""

    @property
    def num_data_ranks(self) -> int:
        """Return the number of processes that see different samples."""
        return self.runtime.num_processes

    @property
    def data_rank(self) -> int:
        """Return this process's rank among those that see different samples."""
        return self.runtime.process_index

    @property
    def data_group(self) -> Any:
        """The processes that see different samples: None for all."""
        return None

    @property
    def replicas(self) -> tuple[Sequence[int], Any]:
        """The ranks that hold the same parameters as this one, and their group; empty if no other does."""
        return (), None

    def connect_loader(self, loader: Any) -> None:  # noqa: B027 - only used where members of the run change
        """Let a prepared loader follow the members of the run."""

    @property
    def num_gradient_shares(self) -> int:
        """Return the number of processes that gradients are averaged over."""
        return self.runtime.num_processes

    @property
    def gradient_group(self) -> Any:
        """The processes over which gradients are averaged: None for all."""
        return None

    holds_whole_models = True
    """Every process holds a part of every tensor of its models; False for pipeline stages."""

    @property
    def saves_shards(self) -> bool:
        """Return whether checkpoints hold shards instead of full tensors."""
        return False

    def engine_states(self, models: Sequence[nn.Module]) -> list[EngineState | None]:
        """Return the engine state of each model and its optimizer; None for models without an engine."""
        return [None] * len(models)

    @property
    def published(self) -> Mapping[str, Any]:
        """Attributes of `AcceleratorState` that depend on the strategy."""
        return {}

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run the backward pass of a loss that is already scaled to its share of the step."""
        if options:
            loss.backward(**options)  # type: ignore[no-untyped-call]
        else:  # the hot path: a call without ** is cheaper
            loss.backward()  # type: ignore[no-untyped-call]

    def check_mean_loss(self, loss: Tensor) -> None:  # noqa: B027 - only used with context parallelism
        """Inspect a mean loss before its backward pass; warn if processes average over different numbers of items."""

    def objection_to_early_steps(self, params: Sequence[Tensor]) -> str | None:
        """Return why these parameters cannot step in the backward pass; None if hooks see their complete gradients."""
        return f"{self.asks_for} completes gradients after the backward pass."

    def scale_gradients(self, models: Iterable[nn.Module], factor: Tensor) -> None:
        """Multiply the accumulated gradients."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for model in models:
            for param in model.parameters():
                if param.grad is not None:
                    by_dtype.setdefault(param.grad.dtype, []).append(local(param.grad))
        for dtype, gradients in by_dtype.items():
            torch._foreach_mul_(gradients, factor.to(dtype))

    def forward_backward(self, model: nn.Module, batch: Batch, shares: Shares, backward: Callable[..., None]) -> Tensor:
        """Compute the gradients of one batch and return its mean loss.

        `backward` runs the backward pass of a loss. A strategy that runs its own backward passes does so inside
        `shares`, which yields the scaling of the loss.
        """
        loss = batch.loss_of(model(*batch.args, **batch.kwargs), batch.target)
        backward(loss, num_items=batch.num_items)
        return loss.detach() if batch.num_items is None else loss.detach() / batch.num_items

    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """Return a context in which backward passes do not reduce gradients."""
        return nullcontext()

    def resume_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """Return a context in which backward passes reduce gradients, although the forward pass ran in `no_sync`."""
        return nullcontext()

    def split_sequences(
        self, buffers: Sequence[Tensor], dims: Sequence[int], no_restore: set[Tensor] | None
    ) -> AbstractContextManager[object]:
        """Return a context in which sequences are sharded, if the strategy shards them."""
        return nullcontext()

    @property
    def batch_division(self) -> Any:
        """What divides the batches of loaders that are prepared with a model: None if nothing does."""
        return None

    def complete_gradients(self) -> None:  # noqa: B027 - other strategies reduce in the backward pass
        """Reduce gradients that are about to be read, if the backward pass has not done so."""

    def clip_grad_norm(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float) -> Tensor:
        """Scale gradients so that their norm is at most `max_norm`; return the norm they had."""
        return torch.nn.utils.clip_grad_norm_(self.current(parameters), max_norm, norm_type=norm_type)

    def clip_grad_value(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Cut every gradient element to `[-clip_value, clip_value]`."""
        torch.nn.utils.clip_grad_value_(self.current(parameters), clip_value)

    def expert_counts(self, model: nn.Module) -> dict[str, Tensor]:
        """Return how many tokens each expert got, by module; nothing where experts are not spread."""
        return {}

    def current(self, parameters: Iterable[Tensor] | Tensor) -> Iterable[Tensor] | Tensor:
        """Map parameters to their replacements; a list made before `prepare` may hold replaced ones."""
        if not self._successors:
            return parameters
        given = [parameters] if isinstance(parameters, Tensor) else parameters
        return [self._newest(param) for param in given]

    def _newest(self, param: Tensor) -> Tensor:
        """Follow the replacements of a parameter: a move may make a new one, and splitting it another."""
        while (successor := self._successors.get(param)) is not None:
            param = successor
        return param

    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the full state dict of a model."""
        return model.state_dict()

    def _place(self, model: nn.Module) -> None:
        """Place a model before it is wrapped."""
        self._move(model)

    def _move(self, model: nn.Module) -> None:
        """Move a model to the device, and record which parameters were replaced by new objects.

        `Module.to` replaces a shared parameter once per module; the sharing is restored here.
        """
        before = list(model.named_parameters(remove_duplicate=False))
        model.to(self.runtime.device)
        for name, old in before:
            owner, own_name = owner_of(model, name)
            new = getattr(owner, own_name)
            if new is not old and (successor := self._succeed(old, new)) is not new:
                setattr(owner, own_name, successor)

    def _succeed(self, old: Tensor, new: Tensor) -> Tensor:
        """Record that a parameter was replaced, and keep its hooks; return the replacement, which is the first one."""
        if old not in self._successors:
            self._successors[old] = new
            carry_hooks(old, new)
        return self._successors[old]

    def _rebind(self, optimizer: torch.optim.Optimizer) -> None:
        """Point an optimizer at the replacements of its parameters, and move its state; see references.py."""
        if self._successors:
            Rebinding({old: self._newest(old) for old in list(self._successors)}).apply(optimizer)
        for each in optimizers_in(optimizer):
            move_optimizer_state(each, self.runtime.device)


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of all groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def full_steps_of(optimizer: Any) -> Any:
    """Return the `FullSteps` of an optimizer, prepared or not, whose parameters are stepped whole; None for others."""
    return getattr(optimizer, FULL_STEPS, None)


def move_optimizer_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move an optimizer's state to its parameters' devices; step counters only if its kernels read them there."""
    counted_in_kernel = {
        id(param)
        for group in optimizer.param_groups
        if group.get("fused") or group.get("capturable")
        for param in group["params"]
    }
    for param, state in optimizer.state.items():
        target = param.device if isinstance(param, Tensor) else device
        for name, value in state.items():
            if name != "step" or id(param) in counted_in_kernel:
                state[name] = recursively_apply(lambda tensor, target=target: tensor.to(target), value)
