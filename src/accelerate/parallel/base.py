"""What a way of spreading a model must offer: `Strategy`, its `Capabilities`, and the `Bundle` it prepares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..runtime.collectives.nested import recursively_apply
from ..runtime.group.runtime import Runtime
from ..runtime.modules import owner_of
from .modules.dtensors import local


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What the façade may ask a strategy for, instead of asking which one it is."""

    defers_sync: bool = False
    """Gradients can be accumulated without being reduced (`no_sync`)."""
    owns_scaling: bool = False
    """The engine scales losses in fp16: nobody else does."""
    compiles_inside: bool = False
    """What `torch.compile` is given is the model inside the wrapper, in place."""


@dataclass(kw_only=True)
class Bundle:
    """Everything that one `prepare` call brought for a strategy to work on."""

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)
    """Samples of one process in a micro-batch, of every loader that is known so far."""
    accumulation_steps: int = 1
    """Micro-batches per step."""
    split_batches: bool = False
    """A batch of the plain loader is one of all processes together, so that a step consumes one of them."""
    place_models: list[bool] = field(default_factory=list)
    """For each model, whether to move it to the device."""
    evaluation: bool = False
    """The models will not be trained: nothing needs to be synchronised."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one `forward_backward` call brought: what the model is called with, and how its outputs become a loss."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any = None
    loss_fn: Callable[..., Tensor] | None = None
    num_items: int | Tensor | None = None
    """Over how many items the loss is a sum; None where it is a mean."""

    def loss_of(self, outputs: Any, target: Any) -> Tensor:
        """Return the loss of outputs: by the function, or the one that the model itself returned."""
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
"""A context for backward passes, and what says with what that of each loss begins."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps of sharding a model that other libraries overwrite: each takes a model and returns it."""

    recompute: Callable[[nn.Module], nn.Module]
    shard: Callable[[nn.Module], nn.Module]


class EngineState(ABC):
    """A model and its optimizer whose state only an engine can take apart and put together: named trees of data."""

    @abstractmethod
    def capture(self) -> dict[str, Any]:
        """Return what this process saves, file by file; all processes call it."""

    @abstractmethod
    def wanted(self, files: Sequence[str]) -> list[str]:
        """Choose what this process must read among the files that were saved."""

    @property
    @abstractmethod
    def classes(self) -> list[Any]:
        """What the files hold beside plain data."""

    @abstractmethod
    def objection(self, states: Mapping[str, Any]) -> str | None:
        """Say why what was read does not fit, before anything is changed."""

    @abstractmethod
    def restore(self, states: Mapping[str, Any], folder: Path) -> None:
        """Take what was read; all processes call it."""

    def companions(self) -> dict[str, str]:
        """Return small files, name -> text, that go beside the folder for other tools."""
        return {}


class Strategy(ABC):
    """A way of spreading a model over the processes of a `Runtime`."""

    capabilities: Capabilities
    mesh: Any = None
    """The grid of processes that models are spread over, where there is one."""
    steps: Steps | None = None
    """By whose functions models are sharded; without any, by the strategy's own."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        # A parameter that was replaced -> the one that took its place.
        self._successors: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()
        self._optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to the objects of this process: weak references, and functions of the Accelerator."""
        return {**self.__dict__, "_successors": None, "_optimizers": None, "steps": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _successors=WeakIdKeyDictionary(), _optimizers=WeakSet())

    def prepare(self, bundle: Bundle) -> Bundle:
        """Place and wrap the models, then bind the optimizers to the parameters the models now have."""
        models = []
        for model, place in zip(bundle.models, bundle.place_models, strict=True):
            if place:
                (self._move if bundle.evaluation else self._place)(model)
            models.append(model if bundle.evaluation else self.wrap(model))
        self._optimizers.update(bundle.optimizers)
        for optimizer in self._optimizers:  # earlier ones too: theirs may be the models that come now
            self._rebind(optimizer)
        return replace(bundle, models=models)

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model as it will be trained."""

    @property
    def num_data_ranks(self) -> int:
        """Return how many processes see different samples."""
        return self.runtime.num_processes

    @property
    def data_rank(self) -> int:
        """Return this process's number among those that see different samples."""
        return self.runtime.process_index

    @property
    def data_group(self) -> Any:
        """The processes that see different samples: None for all."""
        return None

    @property
    def num_gradient_shares(self) -> int:
        """Return over how many processes gradients are averaged."""
        return self.runtime.num_processes

    @property
    def gradient_group(self) -> Any:
        """The processes over which gradients are averaged: None for all."""
        return None

    holds_whole_models = True
    """Every process has a part of every tensor of its models, or all of it; False for the stages of a pipeline."""

    @property
    def saves_shards(self) -> bool:
        """Tell whether a checkpoint holds every process's part instead of whole tensors."""
        return False

    def engine_states(self, models: Sequence[nn.Module]) -> list[EngineState | None]:
        """Return for each model the engine that owns its state and its optimizer's: None where none does."""
        return [None] * len(models)

    @property
    def published(self) -> Mapping[str, Any]:
        """What `AcceleratorState` says of this strategy, by attribute."""
        return {}

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run the backward pass of a loss that is already its share of the step."""
        if options:
            loss.backward(**options)  # type: ignore[no-untyped-call]
        else:  # every step comes here, and a call without ** is the cheaper one
            loss.backward()  # type: ignore[no-untyped-call]

    def check_mean_loss(self, loss: Tensor) -> None:  # noqa: B027 - only parts of sequences are compared
        """See a mean loss before its backward pass; warn where processes must not weigh the same."""

    def scale_gradients(self, models: Iterable[nn.Module], factor: Tensor) -> None:
        """Multiply the gradients that a window has accumulated."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for model in models:
            for param in model.parameters():
                if param.grad is not None:
                    by_dtype.setdefault(param.grad.dtype, []).append(local(param.grad))
        for dtype, gradients in by_dtype.items():
            torch._foreach_mul_(gradients, factor.to(dtype))

    def forward_backward(self, model: nn.Module, batch: Batch, shares: Shares, backward: Callable[..., None]) -> Tensor:
        """Compute the gradients of one batch and return its mean loss.

        `backward` runs the backward pass of a loss; a strategy that runs it itself does so in the context `shares`,
        and asks it what to begin with.
        """
        loss = batch.loss_of(model(*batch.args, **batch.kwargs), batch.target)
        backward(loss, num_items=batch.num_items)
        return loss.detach() if batch.num_items is None else loss.detach() / batch.num_items

    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """Return a context in which backward passes leave gradients unreduced."""
        return nullcontext()

    def resume_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """Return a context in which a backward pass reduces gradients again, although the forward ran in no_sync."""
        return nullcontext()

    def split_sequences(
        self, buffers: Sequence[Tensor], dims: Sequence[int], no_restore: set[Tensor] | None
    ) -> AbstractContextManager[object]:
        """Return a context in which every process has a part of each sequence, where sequences are split at all."""
        return nullcontext()

    def clip_grad_norm(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float) -> Tensor:
        """Scale gradients so that their norm is at most `max_norm`; return the norm they had."""
        return torch.nn.utils.clip_grad_norm_(self.current(parameters), max_norm, norm_type=norm_type)

    def current(self, parameters: Iterable[Tensor] | Tensor) -> Iterable[Tensor] | Tensor:
        """Return the parameters that took the places of these: a list made before `prepare` may hold replaced ones."""
        if not self._successors:
            return parameters
        given = [parameters] if isinstance(parameters, Tensor) else parameters
        return [self._successors.get(param, param) for param in given]

    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the state of a whole model."""
        return model.state_dict()

    def _place(self, model: nn.Module) -> None:
        """Bring a model that will be wrapped to where that is done."""
        self._move(model)

    def _move(self, model: nn.Module) -> None:
        """Move a model to the device, remembering which parameters had to be replaced by new objects.

        `Module.to` replaces a parameter once for every module that shares it; sharing is restored here.
        """
        before = list(model.named_parameters(remove_duplicate=False))
        model.to(self.runtime.device)
        for name, old in before:
            owner, own_name = owner_of(model, name)
            new = getattr(owner, own_name)
            if new is not old and (successor := self._successors.setdefault(old, new)) is not new:
                setattr(owner, own_name, successor)

    def _rebind(self, optimizer: torch.optim.Optimizer) -> None:
        """Point an optimizer at the successors of its parameters, and bring its state along."""
        if self._successors:
            for group in optimizer.param_groups:
                group["params"] = [self._successors.get(param, param) for param in group["params"]]
            for param in list(optimizer.state):
                successor = self._successors.get(param, param) if isinstance(param, Tensor) else param
                if successor is not param:
                    optimizer.state[successor] = optimizer.state.pop(param)
        move_optimizer_state(optimizer, self.runtime.device)


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of all groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def move_optimizer_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Put an optimizer's moments where its parameters are, and its step counters if its kernels read them there."""
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
