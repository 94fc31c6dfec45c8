"""Step sharded parameters whole: each on the one process that owns it, equal to a step on one process.

[Note: full steps] An optimizer as Muon needs a matrix at once, and its parameters are DTensors. Every parameter gets an
owner, so that all processes have about the same work. Before each `step()` a hook brings parameter and gradient to the
owner, steps them there as plain tensors by a copy of the optimizer that has only these, and brings the new values back
to the shards. The optimizer's own step then finds only the parameters that are not stepped whole. Its
parameter groups hold DTensors at all other times, so that clipping, loss scaling, schedulers and `zero_grad` see what
they always see. The state of a parameter is that of the full tensor, and only its owner has it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ....errors import UnsupportedSettingError
from ...base import FULL_STEPS, full_steps_of, params_of
from ...modules.dtensors import mesh_of, whole
from ...modules.memory.stepping import early_steps_of, part_of
from ...modules.references import flat_copy_in
from .division import Division, ShardGroup, cost_of, ranks_of
from .exchange import Full, MatrixTask, rounds_of

_REQUEST = "_accelerate_steps_full_tensors"
"""The name under which an optimizer keeps which of its parameters are to be stepped whole."""

_WHOLE = ("Muon", "Rprop", "Adafactor")
"""Optimizers that step whole tensors without a request: DTensors lack an operation that they need, or are slow."""
_WHOLE_FROM = ("torch.optim.", "transformers.")

Choice = Callable[[Tensor], bool]
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def step_full_tensors(optimizer: AnyOptimizer, only: Choice | None = None) -> AnyOptimizer:
    """Let an optimizer step full tensors where its parameters are sharded or split. `prepare` does the rest.

    For optimizers that need whole matrices: Shampoo, SOAP, and variants of Muon; torch's own `Muon` needs no request.
    Each parameter is brought to one process, stepped there, and brought back, which gives the result of one process.
    The state of a parameter is on that process only. Without shards, nothing changes.

    An optimizer must treat each parameter by itself. One that computes a number over all parameters (Prodigy,
    D-Adaptation) would compute it over those of one process.

    Args:
        optimizer: The optimizer, before it is prepared.
        only: Whether a parameter is stepped whole; all are if it is None. The others are stepped in shards by the same
            optimizer, which needs no communication and is right for Adam-like updates, as of embeddings.

    Returns:
        The same optimizer.
    """
    if is_a(optimizer, "LBFGS"):
        raise UnsupportedSettingError(
            "step_full_tensors(LBFGS)", "it makes one vector of all gradients.", "Use another optimizer."
        )
    if hasattr(optimizer, "fused_backward"):
        raise UnsupportedSettingError(
            f"step_full_tensors({type(optimizer).__name__})",
            "it steps inside of the backward pass, where gradients are not collected.",
            "Use another optimizer.",
        )
    setattr(optimizer, _REQUEST, only or _all)
    return optimizer


def _all(param: Tensor) -> bool:
    return True


def is_a(optimizer: Optimizer, *names: str) -> bool:
    """Return whether an optimizer is of a class with one of these names."""
    return any(base.__name__ in names for base in type(optimizer).__mro__)


def refuse_vectors(optimizer: Optimizer) -> None:
    """Refuse an optimizer that makes one vector of all its parameters, which are spread."""
    reason = None
    if is_a(optimizer, "LBFGS"):
        reason = "it makes one vector of all gradients, and searches along it."
    elif flat_copy_in(optimizer):
        reason = "it keeps all parameters in one vector, which the shards are no parts of."
    if reason is not None:
        raise UnsupportedSettingError(
            f"{type(optimizer).__name__} on sharded or split parameters",
            reason,
            "Train without shards and split layers (DDP), or use another optimizer.",
        )


def follow(optimizer: Optimizer) -> FullSteps | None:
    """Step full tensors with an optimizer that needs it, if it has DTensors; return how, or None."""
    steps: FullSteps | None = full_steps_of(optimizer)
    only: Choice | None = getattr(optimizer, _REQUEST, None)
    if only is None and is_a(optimizer, *_WHOLE) and f"{type(optimizer).__module__}.".startswith(_WHOLE_FROM):
        only = _all
    if only is None or not any(mesh_of(param) is not None for param in params_of(optimizer)):
        return steps
    if steps is None:
        steps = FullSteps(only)
        steps.attach(optimizer)
    steps.refuse(optimizer)
    steps.assign(param for param in params_of(optimizer) if param.requires_grad)
    steps.keep_own_state(optimizer)
    return steps


class FullSteps:
    """The full parameters of one optimizer; see [Note: full steps]."""

    def __init__(self, only: Choice) -> None:
        self._only = only
        self._owners: Any = WeakIdKeyDictionary()
        self._divisions: Any = WeakIdKeyDictionary()
        self._shard_groups: dict[tuple[int, ...], ShardGroup] = {}
        self._plan: tuple[list[int], list[list[Any]]] = ([], [])
        self._groups: list[list[Tensor]] | None = None
        self._options: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __deepcopy__(self, memo: Any) -> FullSteps:
        return self

    def attach(self, optimizer: Optimizer) -> None:
        """Step full tensors whenever the optimizer steps."""
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_load_state_dict_post_hook(self.keep_own_state)
        setattr(optimizer, FULL_STEPS, self)

    def takes(self, param: Tensor) -> bool:
        """Return whether a parameter is stepped whole by one process."""
        return mesh_of(param) is not None and self._only(param)

    def refuse(self, optimizer: Optimizer) -> None:
        """Refuse parameters that cannot be exchanged."""
        if early_steps_of(optimizer) is not None:
            raise UnsupportedSettingError(
                f"step_in_backward with {type(optimizer).__name__} on sharded parameters",
                "its matrices are stepped whole, all of them in one exchange.",
                "Leave step_in_backward out.",
            )
        for param in filter(self.takes, params_of(optimizer)):
            spread: Any = param
            if spread._local_tensor.device.type != spread.device_mesh.device_type:
                raise UnsupportedSettingError(
                    f"{type(optimizer).__name__} with cpu_offload=True",
                    f"its matrices are stepped whole, on {spread.device_mesh.device_type}, and shards on the "
                    f"{spread._local_tensor.device.type} are not sent there.",
                    "Leave cpu_offload out: each process has the state of its own matrices only.",
                )

    # --- owners -----------------------------------------------------------------------------------------------------

    def owner_of(self, param: Tensor) -> int | None:
        """Return the rank that steps a parameter and has its state; None if it is not stepped whole."""
        if not self.takes(param):
            return None
        self.assign([param])
        owner: int = self._owners[param]
        return owner

    def owns(self, param: Tensor) -> bool:
        """Return whether this rank steps a parameter and has its state."""
        return self.owner_of(param) == dist.get_rank()

    def assign(self, params: Iterable[Tensor]) -> None:
        """Give every parameter without an owner one. All ranks have to do so with the same parameters."""
        costs: dict[tuple[int, ...], list[tuple[float, Tensor]]] = defaultdict(list)
        for param in params:
            if self.takes(param) and param not in self._owners:
                mesh = mesh_of(param)
                ranks = tuple(sorted(ranks_of(mesh)))
                self._shard_groups.setdefault(ranks, ShardGroup(mesh))
                self._owners[param] = -1  # a parameter may be in a list twice
                costs[ranks].append((cost_of(param), param))
        for ranks, found in costs.items():
            for param, owner in self._shard_groups[ranks].assign(found):
                self._owners[param] = owner

    def keep_own_state(self, optimizer: Optimizer) -> None:
        """Drop the state of parameters that other ranks step; gather it first where it is sharded."""
        stated = [param for param in params_of(optimizer) if optimizer.state.get(param)]
        self.assign(stated)
        for param in stated:
            if not self.takes(param):
                continue
            state = {
                name: whole(value) if isinstance(value, Tensor) and mesh_of(value) is not None else value
                for name, value in optimizer.state.pop(param).items()
            }
            if self.owns(param):
                optimizer.state[param] = state

    def gathered(self, params: Sequence[Tensor], state: Mapping[int, Any]) -> dict[int, Any]:
        """Return the state of all parameters by index on rank 0, one after the other from its owner. Collective."""
        rank, found = dist.get_rank(), dict(state)
        for index, param in enumerate(params):
            owner = self.owner_of(param)
            if owner is None or owner == 0 or rank not in (0, owner):
                continue
            parcel = [_on_host(found.pop(index, None))]
            if rank == owner:
                dist.send_object_list(parcel, dst=0)
                continue
            dist.recv_object_list(parcel, src=owner)
            if parcel[0] is not None:
                found[index] = parcel[0]
        return {index: found[index] for index in sorted(found)}

    # --- the step ---------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        changed: Any = None
        if (closure := kwargs.get("closure", args[1] if len(args) > 1 else None)) is not None:
            with torch.enable_grad():
                loss = closure()
            changed = (args[0], lambda: loss), {}  # gradients are there: the optimizer only returns the loss
        self._groups = [group["params"] for group in optimizer.param_groups]
        with torch.no_grad():
            for rounds in self._rounds(optimizer):
                self._run(optimizer, rounds)
        for group, params in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = [param for param in params if not self.takes(param)]
        return changed

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        assert self._groups is not None
        for group, params in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = params
        options, self._options, self._groups = self._options, [], None
        for group, found in options:
            _require_same_options(type(optimizer).__name__, group, found)

    def _rounds(self, optimizer: Optimizer) -> list[list[Any]]:
        """Return the rounds of this step: those of the last one, unless other parameters have gradients now."""
        params = [param for param in params_of(optimizer) if param.grad is not None and self.takes(param)]
        numbers = [id(param) for param in params]
        if numbers != self._plan[0]:
            self.assign(params)
            tasks: dict[tuple[int, ...], list[MatrixTask]] = defaultdict(list)
            for param in params:
                if param not in self._divisions:
                    self._divisions[param] = Division.of(param)
                division = self._divisions[param]
                tasks[tuple(sorted(division.boxes))].append(MatrixTask(param, division, self._owners[param]))
            self._plan = numbers, [rounds_of(self._shard_groups[ranks], found) for ranks, found in tasks.items()]
        return self._plan[1]

    def _run(self, optimizer: Optimizer, rounds: Sequence[Any]) -> None:
        """Step the parameters of this rank while the next ones arrive and the last ones leave."""
        arriving = rounds[0].gather()
        leaving: Callable[[], None] | None = None
        for number, current in enumerate(rounds):
            following = rounds[number + 1].gather() if number + 1 < len(rounds) else None
            fulls = arriving()
            self._step(optimizer, fulls)
            last, leaving = leaving, current.scatter(fulls)
            if last is not None:
                last()
            arriving = following
        if leaving is not None:
            leaving()

    def _step(self, optimizer: Optimizer, fulls: Sequence[Full]) -> None:
        if not fulls:
            return
        by_param = {id(full.param): full.whole for full in fulls}
        groups = [
            (group, {**group, "params": [by_param[id(param)] for param in group["params"] if id(param) in by_param]})
            for group in optimizer.param_groups
        ]
        groups = [(group, part) for group, part in groups if part["params"]]
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for full in fulls:
            if full.param in optimizer.state:
                state[full.whole] = optimizer.state[full.param]
        part = part_of(optimizer, [part for _, part in groups])
        part.state = state
        part.step()
        for full in fulls:
            if full.whole in state:
                optimizer.state[full.param] = state[full.whole]
        self._options += groups


def _require_same_options(name: str, group: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Refuse an optimizer that computes an option from its parameters: every process would have another one."""
    for option, value in found.items():
        here = group.get(option)
        if option != "params" and isinstance(value, (int, float)) and here != value:
            raise UnsupportedSettingError(
                f"{name} on sharded parameters",
                f"its option {option!r} depends on the parameters that are stepped ({value} for those of rank "
                f"{dist.get_rank()}, {here} without), and each process steps some of them.",
                "Use an optimizer that treats each matrix by itself.",
            )


def _on_host(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.cpu()
    if isinstance(tree, Mapping):
        return {name: _on_host(value) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_on_host(value) for value in tree)
    return tree
