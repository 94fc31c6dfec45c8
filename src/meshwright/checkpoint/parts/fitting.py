"""Tell why a state from a file does not fit the object that takes it, before anything is restored.

`load_state_dict` of torch's optimizers, schedulers and scaler checks little: a learning rate may become a text, a
moment may get another shape, a method may be replaced by a number, and what fails at last has changed the weights
before. So the values of a file are compared with those that the live object has. Its state may be younger or of another
version: names may be missing, and a value that is None on one side says nothing.

[Note: a step of a small one] What the state of one of torch's optimizers has to hold depends on its options. It is not
listed here: an optimizer of the same class is made with the options of the file, which checks them, for a parameter
with two elements in each dimension; its first step shows which values a parameter has, and which of their dimensions
are those of the parameter.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...scheduler import AcceleratedScheduler
from ...untrusted import printable

_MOST_NUMBER = 1 << 63
_MOST_DIMENSIONS = 12
_NOT_COMPARED = ("verbose", "params", "param_names")
"""Names of which other versions of torch have values of another kind, or which have nothing to do with the numbers."""
_OF_EVERY_SCHEDULER = ("last_epoch", "lr_lambdas", "_schedulers")
_ONE_PER_GROUP = ("base_lrs", "_last_lr", "min_lrs")
_SWITCHES = ("foreach", "fused", "capturable", "differentiable", "maximize", "amsgrad", "nesterov", "centered")
_MAY_LACK_MOMENTUM = (torch.optim.SGD, getattr(torch.optim, "Muon", torch.optim.SGD))
_SLOW_WAYS = {"foreach": False, "fused": None, "capturable": False, "differentiable": False}
_NO_PROBE = (torch.optim.LBFGS, torch.optim.SparseAdam)
"""Optimizers with a state or gradients of another form."""


# --- Values -----------------------------------------------------------------------------------------------------------


def difference(saved: Any, own: Any, at: str, *, finite: bool = False) -> str | None:
    """Return where a saved value is of another kind than the one that an object has, or None."""
    there, here = _kind(saved), _kind(own)
    if here is None or "nothing" in (here, there):
        return None
    if here == "true or false":
        is_same = there == here or (there == "a number" and saved in (0, 1))
        return None if is_same else _expected(at, here, saved)
    if here == "a number":
        if there == "true or false":
            return None
        return _objection_to_number(saved, at, finite=finite or isinstance(own, int))
    if here == "a tensor":
        return None if isinstance(saved, Tensor) and saved.shape == own.shape else _expected(at, _shape(own), saved)
    if there != here:
        return _expected(at, here, saved)
    if here == "a list":
        return _difference_of_lists(saved, own, at, finite=finite)
    return _difference_of_mappings(saved, own, at) if here == "a dictionary" else None


def _kind(value: Any) -> str | None:
    if value is None:
        return "nothing"
    if isinstance(value, (bool, np.bool_)):
        return "true or false"
    if isinstance(value, (int, float, np.number)):
        return "a number"
    if isinstance(value, Tensor):
        return "a number" if value.numel() == 1 else "a tensor"
    if isinstance(value, str):
        return "a text"
    if isinstance(value, (list, tuple)):
        return "a list"
    return "a dictionary" if isinstance(value, Mapping) else None


def _expected(at: str, expected: str, saved: Any) -> str:
    found = _shape(saved) if isinstance(saved, Tensor) else _kind(saved) or f"a {type(saved).__name__}"
    return f"{at} is {found} in the checkpoint, expected {expected}"


def _shape(tensor: Tensor) -> str:
    return f"a tensor of shape {tuple(tensor.shape)}"


def _objection_to_number(saved: Any, at: str, *, finite: bool) -> str | None:
    if _kind(saved) != "a number" or isinstance(saved, (complex, np.complexfloating)):
        return _expected(at, "a number", saved)
    if isinstance(saved, Tensor):
        if saved.is_meta or saved.is_complex() or saved.is_quantized:
            return f"{at} has no value in the checkpoint"
        saved = saved.item()
    if isinstance(saved, int):
        return None if abs(saved) < _MOST_NUMBER else f"{at} is out of range in the checkpoint"
    return f"{at} is {saved} in the checkpoint" if finite and not math.isfinite(saved) else None


def _difference_of_lists(saved: Sequence[Any], own: Sequence[Any], at: str, *, finite: bool) -> str | None:
    if not own:
        return None
    like = [own[min(index, len(own) - 1)] for index in range(len(saved))]
    pairs = enumerate(zip(saved, like, strict=True))
    return _first(difference(value, mine, f"{at}[{index}]", finite=finite) for index, (value, mine) in pairs)


def _difference_of_mappings(saved: Mapping[Any, Any], own: Mapping[Any, Any], at: str) -> str | None:
    if own and all(type(name) is int for name in own):  # counts, for example of milestones
        if not all(type(name) is int for name in saved):
            return f"{at} has names that are no numbers in the checkpoint"
        some = next(iter(own.values()))
        return _first(difference(value, own.get(name, some), f"{at}[{name}]") for name, value in saved.items())
    common = [name for name in own if name in saved and name not in _NOT_COMPARED]
    return _first(difference(saved[name], own[name], f"{at}.{name}".lstrip(".")) for name in common)


def _first(found: Any) -> str | None:
    return next(filter(None, found), None)


# --- Schedulers, scalers, modules -------------------------------------------------------------------------------------


def objection_to_state(state: Any, owner: Any) -> str | None:
    """Return why a state does not fit an object of torch; other objects judge themselves."""
    if isinstance(owner, AcceleratedScheduler):
        return _objection_to_scheduler(state, owner.scheduler)
    if isinstance(owner, torch.optim.lr_scheduler.LRScheduler):
        return _objection_to_scheduler(state, owner)
    if isinstance(owner, torch.optim.Optimizer):
        return objection_to_optimizer(state, owner)
    if isinstance(owner, torch.amp.GradScaler):
        return _objection_to_scaler(state, owner)
    if isinstance(owner, nn.Module):
        return _objection_to_module(state, owner)
    return None


def _objection_to_scheduler(state: Any, scheduler: Any) -> str | None:
    own = scheduler.state_dict()
    if not isinstance(own, Mapping):
        return None
    if not isinstance(state, Mapping):
        return _expected("the state", "a dictionary", state)
    if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        if (found := _objection_to_names(state, own, scheduler)) is not None:
            return found
        missing = [name for name in _OF_EVERY_SCHEDULER if name in own and name not in state]
        if missing:
            return f"the checkpoint lacks {', '.join(missing)}"
        if (found := _objection_to_inner(state, own, scheduler)) is not None:
            return found
    for name in _ONE_PER_GROUP:
        there, here = state.get(name), own.get(name)
        if isinstance(there, (list, tuple)) and isinstance(here, (list, tuple)) and len(there) != len(here):
            return f"{name} has {len(here)} values here and {len(there)} in the checkpoint"
    return _difference_of_mappings(state, own, "")


def _objection_to_inner(state: Mapping[str, Any], own: Mapping[str, Any], scheduler: Any) -> str | None:
    """Return why the states of schedulers or functions that a scheduler holds do not fit them."""
    for name in ("_schedulers", "lr_lambdas"):
        if name not in own:
            continue
        inner = state[name]
        if not isinstance(inner, (list, tuple)) or len(inner) != len(own[name]):
            return f"{name} has {len(own[name])} values here and others in the checkpoint"
        if name == "_schedulers":
            found = _first(map(_objection_to_scheduler, inner, scheduler._schedulers))
        else:
            found = _first(map(_objection_to_function, inner, own[name], scheduler.lr_lambdas))
        if found is not None:
            return f"{name}: {found}"
    return None


def _objection_to_names(state: Mapping[Any, Any], own: Mapping[str, Any], owner: Any) -> str | None:
    """Refuse names that torch would set on an object and that are no values of it: a method, or the optimizer."""
    kind = type(owner)
    behaviour = {name for name in dir(kind) if name.startswith("__") or _is_behaviour(getattr(kind, name))}
    taken = {"optimizer", *behaviour} - own.keys()
    hidden = [name for name in state if not isinstance(name, str) or name in taken]
    return (
        f"the checkpoint has {printable(str(hidden[0]), 60)}, which is no value of {kind.__name__}" if hidden else None
    )


def _objection_to_function(state: Any, own: Any, function: Any) -> str | None:
    """Compare the attributes of an object that is called for a learning rate; a plain function has none."""
    if own is None or state is None:
        return None if own is state else "a function has attributes"
    if not isinstance(state, Mapping):
        return _expected("the state", "a dictionary", state)
    return _objection_to_names(state, own, function) or _difference_of_mappings(state, own, "")


def _is_behaviour(value: Any) -> bool:
    return callable(value) or isinstance(value, property)


def _objection_to_scaler(state: Any, scaler: Any) -> str | None:
    own = torch.amp.GradScaler.state_dict(scaler)  # without a deferred update
    if not own:
        return None  # it is disabled, and loads nothing
    if not isinstance(state, Mapping):
        return _expected("the state", "a dictionary", state)
    missing = [name for name in own if name not in state]
    if missing:
        return f"the checkpoint lacks {', '.join(missing)}"
    for name in own:
        if (found := _objection_to_number(state[name], name, finite=True)) is not None:
            return found
        if not state[name] > 0 and name != "_growth_tracker":
            return f"{name} is {state[name]} in the checkpoint"
    return None


def _objection_to_module(state: Any, module: nn.Module) -> str | None:
    """Compare shapes, and names unless the module changes them while it loads."""
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        return None
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        return _expected("the state", "a dictionary of names", state)
    own = module.state_dict(keep_vars=True)
    found = objection_to_tensors(state, own)
    has_own_way = any(
        each._load_state_dict_pre_hooks
        or (
            not type(each).__module__.startswith("torch.nn.")
            and type(each)._load_from_state_dict is not nn.Module._load_from_state_dict
        )
        for each in module.modules()
    )
    if found or has_own_way:
        return found
    differing = sorted(own.keys() ^ state.keys())
    return f"the names differ: {printable(', '.join(differing[:4]))}" if differing else None


def objection_to_tensors(
    saved: Mapping[str, Any], own: Mapping[str, Any], *, may_lack_values: bool = False
) -> str | None:
    """Compare the tensors that both have: their shapes, and that they hold numbers of a form that can be copied."""
    problems = []
    for name in sorted(own.keys() & saved.keys()):
        here, there = own[name], saved[name]
        if not isinstance(here, Tensor) or isinstance(here, nn.UninitializedParameter | nn.UninitializedBuffer):
            continue
        if not isinstance(there, Tensor):
            problems.append(f"{name} is {_kind(there) or type(there).__name__} in the checkpoint, expected a tensor")
        elif may_lack_values and there.is_meta:
            continue
        elif there.shape != here.shape:
            problems.append(f"{name} has shape {tuple(here.shape)} here and {tuple(there.shape)} in the checkpoint")
        elif (there.is_meta and not here.is_meta) or (there.is_quantized and not here.is_quantized):
            problems.append(f"{name} has no plain numbers in the checkpoint")
    return "; ".join(problems[:3]) or None


# --- Optimizers -------------------------------------------------------------------------------------------------------


def objection_to_optimizer(state: Any, optimizer: Any) -> str | None:
    """Return why the state of an optimizer does not fit: its groups, their options, and the values of parameters."""
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return "the checkpoint holds no state of an optimizer"
    groups = state.get("param_groups")
    if not isinstance(groups, (list, tuple)) or not all(_is_group(group) for group in groups):
        return "the checkpoint holds no parameter groups of an optimizer"
    if found := _objection_to_groups(groups, optimizer):
        return found
    is_torchs = type(optimizer) in vars(torch.optim).values() and type(optimizer) not in _NO_PROBE
    return _objection_to_moments(state["state"], groups, optimizer) if is_torchs else None


def _objection_to_groups(groups: Sequence[Any], optimizer: Any) -> str | None:
    own = optimizer.param_groups
    there, here = [len(group["params"]) for group in groups], [len(group["params"]) for group in own]
    if there != here:
        return f"the groups have {here} parameters here and {there} in the checkpoint"
    identities = [identity for group in groups for identity in group["params"]]
    if not all(type(identity) in (int, str) for identity in identities) or len(set(identities)) != len(identities):
        return "the checkpoint does not tell its parameters apart"
    defaults = getattr(optimizer, "defaults", {})
    for number, (group, mine) in enumerate(zip(groups, own, strict=True)):
        found = _objection_to_options(group, mine, defaults, f"of group {number}")
        if found is not None:
            return found
    return None


def _is_group(group: Any) -> bool:
    return isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple))


def _objection_to_options(
    group: Mapping[str, Any], mine: Mapping[str, Any], defaults: Mapping[str, Any], where: str
) -> str | None:
    for name in mine:
        if name not in group or name in _NOT_COMPARED:
            continue
        at = f"{name} {where}"
        if name in _SWITCHES and not isinstance(group[name], (bool, type(None))):
            return _expected(at, "true or false", group[name])
        if found := difference(group[name], mine[name], at, finite=name in defaults and _is_finite(mine[name])):
            return found
    return None


def _is_finite(value: Any) -> bool:
    numbers = value if isinstance(value, (list, tuple)) else [value]
    return all(math.isfinite(number) for number in numbers if isinstance(number, (int, float)))


def _objection_to_moments(moments: Mapping[Any, Any], groups: Sequence[Any], optimizer: Any) -> str | None:
    """Compare the values of every parameter with those of a small one: [Note: a step of a small one]."""
    params = {
        identity: param
        for group, mine in zip(groups, optimizer.param_groups, strict=True)
        for identity, param in zip(group["params"], mine["params"], strict=True)
    }
    if unknown := [identity for identity in moments if identity not in params]:
        return f"the checkpoint has the state of parameter {printable(str(unknown[0]), 60)}, which is in no group"
    kind = type(optimizer)
    for number, group in enumerate(groups):
        probes: dict[int, Mapping[str, Any]] = {}
        for dim in sorted({params[identity].dim() for identity in group["params"]}):
            if dim > _MOST_DIMENSIONS:
                continue
            try:
                probes[dim] = _state_of_small_one(kind, group, dim)
            except Exception as error:
                if not _can_step(kind, optimizer.param_groups[number], dim):
                    return None
                return f"{kind.__name__} does not take the options of group {number}: {error}"
        for identity in group["params"]:
            of_one, param = moments.get(identity, {}), params[identity]
            if found := _objection_to_one(of_one, probes.get(param.dim()), param, kind):
                return f"the state of parameter {identity} {found}"
    return None


def _objection_to_one(of_one: Any, small: Mapping[str, Any] | None, param: Tensor, kind: Any) -> str | None:
    if not isinstance(of_one, Mapping) or not all(isinstance(name, str) for name in of_one):
        return "is no dictionary of names"
    found = _objection_to_values(of_one, small, param, kind) if of_one and small is not None else None
    return f"does not fit: {found}" if found is not None else None


def _state_of_small_one(kind: Any, group: Mapping[str, Any], dim: int) -> Mapping[str, Any]:
    """Return the state of a parameter after a step of an optimizer with the options of a group."""
    known = inspect.signature(kind).parameters
    options = {
        name: value.item() if isinstance(value, Tensor) else value
        for name, value in {**group, **_SLOW_WAYS}.items()
        if name in known and name != "params"
    }
    param = nn.Parameter(torch.zeros([2] * dim, device="cpu", dtype=torch.float32))
    param.grad = torch.zeros_like(param)
    small = kind([param], **options)
    with torch.no_grad():
        inspect.unwrap(kind.step)(small)  # without the hooks for all optimizers
    return dict(small.state[param])


def _can_step(kind: Any, group: Mapping[str, Any], dim: int) -> bool:
    try:
        _state_of_small_one(kind, group, dim)
    except Exception:
        return False
    return True


def _objection_to_moment(value: Any, name: str, like: Tensor, param: Tensor) -> str | None:
    shape = tuple(length if small == 2 else small for small, length in zip(like.shape, param.shape, strict=True))
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        return _expected(name, f"a tensor of shape {shape}", value)
    if value.is_meta or value.is_quantized or value.is_complex() != param.is_complex():
        return f"{name} has no plain numbers in the checkpoint"
    return None


def _objection_to_values(saved: Mapping[str, Any], small: Mapping[str, Any], param: Tensor, kind: Any) -> str | None:
    for name, like in small.items():
        value = saved.get(name)
        if value is None:
            if name == "momentum_buffer" and kind in _MAY_LACK_MOMENTUM:
                continue
            return f"the checkpoint lacks {name}"
        if not isinstance(like, Tensor) or like.dim() == 0:
            found = _objection_to_number(value, name, finite=param.dim() > 0)
        else:
            found = _objection_to_moment(value, name, like, param)
        if found is not None:
            return found
    for name in saved.keys() - small.keys():
        if isinstance(saved[name], Tensor) and (saved[name].is_meta or saved[name].is_quantized):
            return f"{name} has no plain numbers in the checkpoint"
    return None
