"""Check the first two steps of every run: `FirstSteps`.

[Note: first steps] The check is on unless `MESHWRIGHT_FIRST_STEPS=off`, so it may cost nothing afterwards, must not
make a rank wait, and must not alarm a right script. Hence:

- It runs no collective. Each rank writes what it saw into the store of the process group, and counts itself there; the
  rank that comes last compares. Where a rank never comes, nothing is compared, and nobody notices.
- It looks at results, not at style: an optimizer that was not prepared is no finding, gradients that differ are one.
- Ranks that hold the same parameters, or share samples, are those that the strategy names.
- It reads a bounded number of elements, however large the model is.
- Whatever it does not expect ends the check and not the run.
"""

from __future__ import annotations

import functools
import logging
import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...config.environment import FIRST_STEPS_MODES, read_setting, variable_of
from ...errors import FirstStepsError, FirstStepsWarning, UnsupportedSettingError
from ...errors.callers import user_place, warn_at
from ...instruments import Instrument
from ...parallel.base import Bundle, params_of
from ...parallel.modules.memory.stepping import early_steps_of
from ...runtime.collectives.operations import mesh_of
from ...runtime.devices import device as devices
from ...runtime.group.runtime import Runtime
from .records import Copies, Mistake, Record, compare
from .samples import evenly, fingerprint, norms

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
STEPS = 2
_MOST_STEPS = 4
"""Steps of one optimizer after which those that step more rarely are not waited for."""
_RANKS = 64
"""Only so many ranks are compared: a mistake of a script shows on any of them."""
_MOST_INPUTS = 16
_NOT_PREPARED = "Give the model to prepare() together with its optimizer."
_NOT_AVERAGED = (
    "They are not averaged. Call the model that prepare() returned, not the one inside of it, and add layers or "
    "adapters to a model before prepare()."
)


def first_steps() -> FirstSteps:
    """Return the check of this process, one for each time that the library is started."""
    runtime = Runtime.current()
    check = FirstSteps.current
    if check is None or check.runtime is not runtime:
        if check is not None:
            check.stop()
        check = FirstSteps.current = FirstSteps(runtime)
    return check


def _quietly(method: F) -> F:
    """Let a method of the check end the check instead of the run, if it fails."""

    @functools.wraps(method)
    def looking(self: FirstSteps, *args: Any, **kwargs: Any) -> None:
        if self.is_over or torch.compiler.is_compiling():
            return
        try:
            method(self, *args, **kwargs)
        except (FirstStepsError, Warning):  # `python -W error` makes errors of warnings
            self.stop()
            raise
        except Exception as error:
            self.stop()
            logger.warning("The check of the first steps ended early, and training goes on: %r", error)

    return cast(F, looking)


@dataclass(eq=False)
class _Steps:
    """What was seen of an optimizer."""

    made: int = 0
    passes: int = 0
    """Backward passes since its last step."""
    lone_passes: int = 0
    """Steps of a single backward pass."""
    empty: int = 0
    """Steps without any gradient."""
    has_closure: bool = False
    kept: tuple[Any, float] | None = None
    """A reference to a parameter whose gradient nobody has cleared or changed since the last step, and its norm."""


class FirstSteps(Instrument):
    """The check of one process: it sees the first steps of all of its Accelerators, and then removes itself."""

    current: ClassVar[FirstSteps | None] = None

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.is_over = False
        mode = read_setting("first_steps") or "warn"
        if mode not in FIRST_STEPS_MODES:
            raise UnsupportedSettingError(
                f"{variable_of('first_steps')}={mode}", "there is no such mode.", f"Use {', '.join(FIRST_STEPS_MODES)}."
            )
        self._raises = mode == "raise"
        self._compares = runtime.num_processes > 1 and runtime.member is None and runtime.process_index < _RANKS
        self._record = Record()
        self._accelerators: WeakSet[Any] = WeakSet()
        self._accumulating: WeakSet[Any] = WeakSet()
        """Accelerators whose `accumulate` is used."""
        self._seen: WeakKeyDictionary[Optimizer, _Steps] = WeakKeyDictionary()
        self._rates: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
        """The learning rates at the beginning of the last micro-batch of an open window."""
        self._inputs: list[int | None] = []
        self._losses = 0
        self._stepping: Any = None
        """The prepared optimizer whose step is under way, or was left by an exception."""
        self._has_passed = False
        self._told: set[str] = set()
        self._hooks: list[Any] = [register_optimizer_step_pre_hook(self._before_step)]

    def stop(self) -> None:
        """Look at nothing more."""
        self.is_over = True
        for hook in self._hooks:
            hook.remove()
        for accelerator in list(self._accelerators):
            accelerator.instruments.remove(self)
        for kept in (self._hooks, self._accelerators, self._seen, self._rates, self._inputs):
            kept.clear()

    # --- events -----------------------------------------------------------------------------------------------------

    def attached(self, accelerator: Any) -> None:
        """See an Accelerator, if the first steps are not over; reading a value on an XLA device would cost a graph."""
        if self.is_over or devices.is_xla(accelerator.device):
            accelerator.instruments.remove(self)
        else:
            self._accelerators.add(accelerator)

    @_quietly
    def prepare_ended(self, accelerator: Any, bundle: Bundle) -> None:
        """Look at what models are given, where ranks should see different samples."""
        self._record.data_rank = accelerator.strategy.data_rank
        for model in () if bundle.evaluation or not self._compares else bundle.models:
            if getattr(model, "_compiled_call_impl", None) is None:  # a hook would be compiled, too
                self._hooks.append(model.register_forward_pre_hook(_note_inputs, with_kwargs=True))

    @_quietly
    def loader_prepared(self, accelerator: Any, loader: Any) -> None:
        """Write down how many batches a loader has."""
        is_divided = getattr(loader, "shard", None) is not None  # by index; data that came divided may be uneven
        if self._compares and accelerator.even_batches and is_divided and loader.num_processes > 1:
            self._record.lengths.append((_length(loader), user_place()))

    @_quietly
    def micro_batch_started(self, accelerator: Any, models: tuple[nn.Module, ...]) -> None:
        """See whether learning rates change within a window."""
        self._accumulating.add(accelerator)
        if not accelerator.step_scheduler_with_optimizer:  # the script said that it does this itself
            return
        groups = [group for optimizer in accelerator._optimizers for group in optimizer.param_groups]
        rates = [group.get("lr") for group in groups]
        before = self._rates.get(accelerator)
        if before is not None and all(isinstance(rate, float) for rate in rates + before) and before != rates:
            self._tell(
                "The learning rate changed between two micro-batches of one step: the scheduler advances on every "
                "micro-batch. Give it to prepare(), or step it only `if accelerator.sync_gradients`."
            )
        self._rates[accelerator] = rates

    @_quietly
    def backward_started(self, accelerator: Any, loss: Tensor | None) -> None:
        """Look at the loss, and see whether gradients of the last step were cleared."""
        if self._stepping is not None:  # a closure computes the gradients within the step
            self._seen.setdefault(self._stepping, _Steps()).has_closure = True
        self._has_passed = True
        if loss is not None:
            self._look_at_loss(loss)
        for steps in self._seen.values():
            if steps.kept is not None and not _is_kept(*steps.kept):
                steps.kept = None

    @_quietly
    def backward_ended(self, accelerator: Any, loss: Tensor) -> None:
        """Count the backward passes."""
        for optimizer in accelerator._optimizers:
            self._seen.setdefault(optimizer, _Steps()).passes += 1

    @_quietly
    def step_started(self, optimizer: Any) -> None:
        """Look at gradients and parameters before they are used."""
        self._stepping = optimizer
        accelerator = self._owner_of(optimizer)
        steps = self._seen.setdefault(optimizer, _Steps())
        if accelerator is None or steps.made >= STEPS or _captures(accelerator.device):
            return
        self._end_inputs()
        if accelerator.strategy.capabilities.owns_scaling:  # an engine keeps gradients and copies elsewhere
            return
        params = [param for param in params_of(optimizer) if param.requires_grad]
        self._look_at_gradients(accelerator, optimizer, params, steps)
        if steps.made == 0:
            self._write_down(accelerator, optimizer, params)
            return
        if steps.kept is not None and steps.passes > 0:
            self._tell(
                f"{_name(optimizer)} steps with gradients to which those of its last step were added: nobody cleared "
                "them. Call optimizer.zero_grad() after the step."
            )
        self._look_at_accumulation(accelerator, steps)
        self._look_at_schedulers(accelerator)

    @_quietly
    def step_ended(self, optimizer: Any, skipped: bool) -> None:
        """Count a step, and end after the second."""
        self._stepping = None
        accelerator = self._owner_of(optimizer)
        steps = self._seen.setdefault(optimizer, _Steps())
        steps.made += 1
        steps.passes = 0
        self._rates.clear()
        if accelerator is not None and not accelerator.strategy.capabilities.owns_scaling:
            steps.kept = _keep(params_of(optimizer))
        made = [each.made for each in self._seen.values() if each.made]
        if min(made) >= STEPS or max(made) >= _MOST_STEPS:
            self._finish()

    @_quietly
    def closed(self, accelerator: Any) -> None:
        """End with the training."""
        self.stop()

    @_quietly
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at the step of an optimizer that was not prepared, if it trains what was."""
        params = [param for param in params_of(optimizer) if param.requires_grad]
        if self._stepping is not None or not self._has_passed or not self._trains_what_was_prepared(optimizer, params):
            return
        steps = self._seen.setdefault(optimizer, _Steps())
        steps.made += 1
        self._end_inputs()
        if all(param.grad is None for param in params):
            steps.empty += 1
        elif steps.made == 1:
            for accelerator in self._accelerators:
                self._write_down(accelerator, optimizer, params)
        if steps.empty >= STEPS and self._model_has_gradients():
            self._tell(
                f"{_name(optimizer)} steps, but none of its {len(params)} parameters has a gradient, while the "
                "prepared model has: prepare() replaced them. Give the optimizer to prepare(), together with the model."
            )
        if steps.made >= STEPS:
            self._finish()

    def _trains_what_was_prepared(self, optimizer: Optimizer, params: list[Tensor]) -> bool:
        """Tell whether a plain optimizer steps prepared parameters; a script may have others, which nobody looks at."""
        if self._is_prepared(optimizer):
            return False
        names = self._names()
        return any(id(param) in names for param in params) or not any(each._optimizers for each in self._accelerators)

    def _model_has_gradients(self) -> bool:
        models = (model for each in self._accelerators for model in each._models)
        return any(param.grad is not None for model in models for param in model.parameters())

    # --- what is looked at ------------------------------------------------------------------------------------------

    def _look_at_loss(self, loss: Tensor) -> None:
        self._losses += 1
        value = norms([loss])[0] if self._losses <= _MOST_INPUTS and not _captures(loss.device) else None
        if value is not None and not math.isfinite(value):
            self._tell(
                "The loss is not finite: NaN or infinity. Look at the inputs of this batch, at logarithms, roots and "
                "divisions in the loss, and at the learning rate.",
                topic="finite",
            )

    def _look_at_gradients(self, accelerator: Any, optimizer: Any, params: list[Tensor], steps: _Steps) -> None:
        """See whether gradients exist and are finite; those of fp16 overflow on purpose until the scale is found."""
        held = evenly([param for param in params if param.grad is not None])
        steps.empty += not held
        steps.lone_passes += steps.passes == 1 and not accelerator.gradient_state.end_of_dataloader
        if steps.empty >= STEPS and not steps.has_closure and self._has_passed and not self._any_gradient(optimizer):
            self._tell(
                f"{_name(optimizer)} has made {STEPS} steps, and no parameter had a gradient. "
                "Call accelerator.backward(loss) before optimizer.step(), and optimizer.zero_grad() after it."
            )
        if accelerator.scaler is not None:
            return
        for param, norm in zip(held, norms([param.grad for param in held]), strict=True):
            if norm is not None and not math.isfinite(norm):
                self._tell(
                    f"The gradient of {self._names().get(id(param), 'a parameter')} is not finite: NaN or infinity. "
                    "Parameters will be, too, after this step. Look at the loss and at the inputs of this batch.",
                    topic="finite",
                )
                return

    def _any_gradient(self, optimizer: Any) -> bool:
        """Tell whether any prepared model has a gradient, or those of this optimizer are not to be seen."""
        if early_steps_of(optimizer.optimizer) is not None:  # it steps in the backward pass
            return True
        return self._model_has_gradients()

    def _look_at_accumulation(self, accelerator: Any, steps: _Steps) -> None:
        num_steps = accelerator.gradient_accumulation_steps
        if num_steps > 1 and steps.lone_passes >= STEPS and accelerator not in self._accumulating:
            self._tell(
                f"gradient_accumulation_steps={num_steps}, but every backward pass is followed by a step: nothing is "
                f"accumulated, and gradients are {num_steps} times too small. Put the body of the loop into `with "
                "accelerator.accumulate(model):`, or leave gradient_accumulation_steps out."
            )

    def _look_at_schedulers(self, accelerator: Any) -> None:
        """See whether schedulers set the learning rates of optimizers that step."""
        groups = {id(group) for each in self._accelerators for opt in each._optimizers for group in opt.param_groups}
        for scheduler in accelerator._schedulers:
            own = getattr(scheduler.scheduler, "optimizer", None)
            if not isinstance(own, Optimizer) or self._is_prepared(own) or own in self._seen:
                continue
            if not any(id(group) in groups for group in own.param_groups):
                self._tell(
                    f"{_name(scheduler.scheduler)} was made for an optimizer that does not step: the learning rate of "
                    "the one that does will not change. Make it with the optimizer that is given to prepare()."
                )

    # --- what ranks compare -----------------------------------------------------------------------------------------

    def _write_down(self, accelerator: Any, optimizer: Any, params: list[Tensor]) -> None:
        """Write down the sizes of parameters and gradients that other ranks should have, too."""
        strategy = accelerator.strategy
        if not self._compares or strategy.transaction is not None or accelerator.window.unsynced:
            return
        names, number = self._names(), len(self._record.copies)
        own = [param for param in params if id(param) in names]
        foreign = [param for param in params if id(param) not in names and mesh_of(param) is None]
        ranks, _ = strategy.replicas
        if not any(map(_reduces_otherwise, accelerator._models)):
            ignored = _ignored_by_ddp(accelerator._models)
            synced = [param for param in own if names[id(param)] not in ignored]
            self._add(f"{number}/own", optimizer, synced, ranks, names, _NOT_AVERAGED)
        if strategy.holds_whole_models:
            everyone = range(self.runtime.num_processes)
            self._add(f"{number}/foreign", optimizer, foreign, everyone, names, _NOT_PREPARED)

    def _add(
        self, key: str, optimizer: Any, params: list[Tensor], ranks: Iterable[int], names: dict[int, str], remedy: str
    ) -> None:
        chosen, together = evenly(params), list(ranks)
        if not chosen or len(together) < 2:
            return
        place = user_place()
        labels = [names.get(id(param), f"parameter {number}") for number, param in enumerate(chosen)]
        for what, tensors in (
            ("values of parameters", chosen),
            ("gradients of parameters", [param.grad for param in chosen]),
        ):
            self._record.copies[f"{key}/{what}"] = Copies(
                ranks=together,
                what=f"{what} that {_name(optimizer)} steps",
                remedy=remedy,
                place=place,
                names=labels,
                norms=[None if norm is None else float(f"{norm:.7g}") for norm in norms(tensors)],
            )

    def _end_inputs(self) -> None:
        """Sum up what the models were given since the last step."""
        if self._compares and self._has_passed and len(self._record.inputs) < _MOST_INPUTS and self._inputs:
            known = [number for number in self._inputs if number is not None]
            is_known = len(known) == len(self._inputs)
            self._record.inputs.append(zlib.crc32(repr(known).encode()) if is_known else None)
        self._inputs.clear()

    @_quietly
    def note_inputs(self, inputs: Any) -> None:
        """Keep a number for what a prepared model is given in training."""
        if len(self._inputs) >= _MOST_INPUTS:
            return
        states = [each.gradient_state for each in self._accelerators]
        is_filled = any(state.in_dataloader and state.end_of_dataloader for state in states)
        self._inputs.append(None if is_filled else fingerprint(inputs))
        self._record.place_of_inputs = self._record.place_of_inputs or user_place()

    def _finish(self) -> None:
        """Hand over what was seen; the last rank compares."""
        compares, record, rank = self._compares, self._record, self.runtime.process_index
        self.stop()
        if not compares:
            return
        ranks = min(self.runtime.num_processes, _RANKS)
        store = self.runtime.store("first_steps")
        turn = store.add(f"turns/{rank}", 1)  # the same on every rank, also in a group that was taken over
        store.set(f"{turn}/{rank}", record.as_text())
        if store.add(f"{turn}/arrived", 1) == ranks:
            records = {other: Record.from_text(store.get(f"{turn}/{other}")) for other in range(ranks)}
            for finding in compare(records):
                self._say(finding)

    # --- what is told -----------------------------------------------------------------------------------------------

    def _tell(self, text: str, topic: str = "") -> None:
        """Tell a finding of this rank, unless another one has told it, or what it follows from: the same topic."""
        finding = Mistake(place=user_place(), text=text)
        key = topic or f"{zlib.crc32(repr(finding).encode()):08x}"
        if key in self._told:
            return
        self._told.add(key)
        runtime = self.runtime
        if runtime.num_processes > 1 and not self._raises and runtime.member is None:
            store = runtime.store("first_steps")
            if store.add(f"told/{key}", 1) > 1:
                return
        self._say(finding)

    def _say(self, finding: Mistake) -> None:
        here = f"Rank {self.runtime.process_index}: " if self.runtime.num_processes > 1 and not finding.ranks else ""
        if self._raises:
            path, line = finding.place
            raise FirstStepsError(f"{path}:{line}: {here}{finding.text}")
        off = f"({variable_of('first_steps')}=off leaves this check out.)"
        warn_at(finding.place, f"{here}{finding.text} {off}", FirstStepsWarning)

    # --- whose they are ---------------------------------------------------------------------------------------------

    def _names(self) -> dict[int, str]:
        """Return the names of all parameters of prepared models."""
        models = [model for each in self._accelerators for model in each._models]
        return {id(param): name for model in models for name, param in model.named_parameters()}

    def _owner_of(self, optimizer: Any) -> Any:
        return next((each for each in self._accelerators if any(o is optimizer for o in each._optimizers)), None)

    def _is_prepared(self, optimizer: Optimizer) -> bool:
        return any(prepared.wraps(optimizer) for each in self._accelerators for prepared in each._optimizers)


def _note_inputs(model: nn.Module, args: Any, kwargs: Any) -> None:
    """See what a model is given; a function, so that a copy of the model does not hold the check."""
    check = FirstSteps.current
    if check is not None and torch.is_grad_enabled():
        check.note_inputs((args, kwargs))


def _reduces_otherwise(model: nn.Module) -> bool:
    """Tell whether gradients need not be equal: the script chose how DDP reduces them, or not to reduce them now."""
    inner: Any = getattr(model, "_orig_mod", model)
    return bool(getattr(inner, "_comm_hooks", None)) or getattr(inner, "require_backward_grad_sync", True) is False


def _ignored_by_ddp(models: Iterable[nn.Module]) -> set[str]:
    found: set[str] = set()
    for model in models:
        inner: Any = getattr(model, "_orig_mod", model)
        names = set(getattr(inner, "parameters_to_ignore", ()))
        found |= {prefix + name for name in names for prefix in ("", "module.", "_orig_mod.module.")}
    return found


def _keep(params: Iterable[Tensor]) -> tuple[Any, float] | None:
    """Return a parameter that has a gradient, and the norm of this."""
    for param in evenly(list(params)):
        if param.grad is not None and (norm := norms([param.grad])[0]):
            return ref(param), norm
    return None


def _is_kept(param: Any, norm: float) -> bool:
    held = param()
    return held is not None and held.grad is not None and norms([held.grad])[0] == norm


def _captures(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except Exception:  # a stream, or a data set that does not know
        return None


def _name(thing: Any) -> str:
    return type(getattr(thing, "optimizer", thing) if isinstance(thing, Optimizer) else thing).__name__
