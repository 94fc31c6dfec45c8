"""Find every reference that an optimizer keeps to a parameter, and point it at the parameter's replacement.

[Note: references] An optimizer keeps parameters in `param_groups` and as the keys of `state`. Some keep more: LBFGS a
list of its own, SAM and Lookahead another optimizer, others a dict by parameter or by `id(param)`, a weak reference, or
a hook whose closure holds a list. A reference that is left to a replaced parameter fails without a word: the optimizer
steps a tensor that no model uses. So everything that an optimizer holds is searched, through containers, other
optimizers, closures, default arguments and plain objects, and changed in place, so that whoever shares a container sees
the change. What a function finds in the globals of a script is not searched.

Copies of values (the slow weights of Lookahead) are no references. They are known by their place: beside the parameter
in a mapping by parameter or by `id(param)`, in a pair with it, in a list like that of a group, or in a mapping with the
names of one that holds parameters. They are spread as the parameter is.
"""

from __future__ import annotations

from collections import UserDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from copy import copy
from functools import partial
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

from torch import Tensor, nn
from torch.optim import Optimizer

_MAPPINGS = (dict, UserDict, WeakKeyDictionary, WeakValueDictionary)
_SIZED = (*_MAPPINGS, list, tuple, set, frozenset, deque)
_SEARCHED = (Optimizer, *_SIZED, partial, FunctionType, MethodType)
"""What hooks and closures may hold that is searched. They reach the objects of the script, too, and its data."""
_MOST_PARTS = 100_000
_CLOSED = ("torch.", "accelerate.", "meshwright.", "transformers.", "datasets.", "numpy.", "logging.")
"""The modules of classes whose objects are not searched, except for optimizers."""


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """Return an optimizer and those that it holds, such as the inner one of a wrapper."""
    found: dict[int, Any] = {}
    _search(optimizer, found)
    return [value for value in found.values() if isinstance(value, Optimizer)]


def _search(value: Any, found: dict[int, Any]) -> None:
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor) or id(value) in found:
            continue
        parts = _parts(value)
        if parts is not None:
            found[id(value)] = value  # also keeps the address from being reused
            pending.extend(parts)


def _parts(value: Any) -> Iterator[Any] | None:
    """Return what a value holds; None if it is not searched."""
    if isinstance(value, _SIZED) and len(value) > _MOST_PARTS:
        return None
    if isinstance(value, _SIZED):
        return (
            (part for item in list(value.items()) for part in item)
            if isinstance(value, _MAPPINGS)
            else iter(list(value))
        )
    if isinstance(value, MethodType):
        return iter([value.__self__]) if isinstance(value.__self__, _SEARCHED) else None
    if isinstance(value, partial):
        return iter([value.func, value.args, value.keywords])
    if isinstance(value, FunctionType):
        return iter([*(cell.cell_contents for cell in _cells_of(value)), *_defaults_of(value)])
    return iter(list(_attributes(value).values())) if _is_open(value) else None


def _is_open(value: Any) -> bool:
    """Return whether the attributes of an object are searched."""
    if isinstance(value, Optimizer):
        return True
    closed = isinstance(value, (nn.Module, ModuleType, type)) or f"{type(value).__module__}.".startswith(_CLOSED)
    return not closed and (hasattr(value, "__dict__") or any(_slots_of(type(value))))


def _slots_of(kind: type) -> Iterator[MemberDescriptorType]:
    for each in kind.__mro__:
        if "__slots__" in vars(each):
            yield from (member for member in vars(each).values() if isinstance(member, MemberDescriptorType))


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, those in `__slots__`, too."""
    found = dict(getattr(value, "__dict__", {}))
    for slot in _slots_of(type(value)):
        with suppress(AttributeError):  # empty
            found[slot.__name__] = slot.__get__(value)
    return found


def _set_attribute(value: Any, name: str, part: Any) -> None:
    """Set an attribute, whatever `__setattr__` of its class does, as a frozen dataclass."""
    if name in getattr(value, "__dict__", {}):
        value.__dict__[name] = part
        return
    next(slot for slot in _slots_of(type(value)) if slot.__name__ == name).__set__(value, part)


def _defaults_of(function: FunctionType) -> Iterator[Any]:
    """Yield the default arguments of a function that hold parameters, or what may."""
    for part in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        if isinstance(part, (Tensor, ref, *_SEARCHED)):
            yield part


def _cells_of(function: FunctionType) -> Iterator[Any]:
    """Yield the cells of a closure that hold parameters, or what may: not the objects of the script around it."""
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:
            continue  # empty
        if isinstance(content, (Tensor, ref, *_SEARCHED)):
            yield cell


class Rebinding:
    """Point what optimizers hold at the replacements of parameters; see [Note: references]."""

    def __init__(self, replacements: Mapping[Tensor, Tensor]) -> None:
        self._kept = list(replacements)  # keeps addresses from being reused
        self._replacements = {id(old): replacements[old] for old in self._kept}
        self._numbers = {id(old): id(new) for old, new in replacements.items()}
        self._seen: dict[int, tuple[Any, Any]] = {}

    def apply(self, optimizer: Optimizer) -> None:
        """Change an optimizer in place."""
        self._visit(optimizer)

    def _visit(self, value: Any) -> Any:
        """Change what a value holds in place; return the value, or what stands for it now."""
        if isinstance(value, Tensor):
            return self._replacements.get(id(value), value)
        if type(value) is int:
            return self._numbers.get(value, value)
        if isinstance(value, (str, bytes, float, complex, bool)) or value is None:
            return value
        if id(value) not in self._seen:
            self._seen[id(value)] = value, value
            self._seen[id(value)] = value, self._changed(value)
        return self._seen[id(value)][1]

    def _changed(self, value: Any) -> Any:
        if isinstance(value, ref):
            target = value()
            return ref(self._visit(target)) if isinstance(target, Tensor) else value
        if _parts(value) is None:
            return value
        if isinstance(value, _MAPPINGS):
            self._change_mapping(value)
        elif isinstance(value, (list, deque)):
            for index, part in enumerate(value):
                if (new := self._visit(part)) is not part:
                    value[index] = new
        elif isinstance(value, (tuple, set, frozenset)):
            return self._change_fixed(value)
        elif isinstance(value, FunctionType):
            self._change_function(value)
        elif isinstance(value, (MethodType, partial)):
            for part in _parts(value) or ():
                self._visit(part)
        else:
            self._change_attributes(value)
        return value

    def _change_attributes(self, value: Any) -> None:
        for name, part in _attributes(value).items():
            if (new := self._visit(part)) is not part:
                _set_attribute(value, name, new)

    def _change_function(self, function: FunctionType) -> None:
        for cell in _cells_of(function):
            if (new := self._visit(cell.cell_contents)) is not cell.cell_contents:
                cell.cell_contents = new
        searched = {id(part) for part in _defaults_of(function)}
        defaults = [self._visit(part) if id(part) in searched else part for part in function.__defaults__ or ()]
        if any(new is not old for new, old in zip(defaults, function.__defaults__ or (), strict=True)):
            function.__defaults__ = tuple(defaults)
        by_name = function.__kwdefaults__ or {}
        by_name.update({name: self._visit(part) for name, part in by_name.items() if id(part) in searched})

    def _change_fixed(self, value: Any) -> Any:
        parts = [self._visit(part) for part in value]
        if all(new is part for new, part in zip(parts, value, strict=True)):
            return value
        if isinstance(value, set):
            value.clear()
            value.update(parts)
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)

    def _change_mapping(self, mapping: MutableMapping[Any, Any]) -> None:
        before = list(mapping.items())
        after = [(self._visit(key), self._visit(part)) for key, part in before]
        if any(new[0] is not old[0] for new, old in zip(after, before, strict=True)):
            mapping.clear()
            mapping.update(after)
            return
        for (key, part), (_, new) in zip(before, after, strict=True):
            if new is not part:
                mapping[key] = new


def spread_copies(
    optimizer: Optimizer, spread: Callable[[Tensor, Tensor], Tensor], is_whole: Callable[[Any, Tensor], bool]
) -> None:
    """Spread the copies of parameters that an optimizer keeps, by `spread(value, param)`.

    `is_whole` tells whether what a mapping has for a parameter stays as it is.
    """
    for place, name, param in _copies_in(optimizer, is_whole):
        place[name] = spread(place[name], param)


def _copies_in(
    optimizer: Optimizer, leaves_out: Callable[[Any, Tensor], bool] = lambda mapping, param: False
) -> list[tuple[Any, Any, Tensor]]:
    """Return where an optimizer keeps values like those of a parameter: a container, the place in it, the parameter."""
    found: list[tuple[Any, Any, Tensor]] = []
    columns = _columns(optimizer)
    own = {id(param): param for params in columns for param in params}
    holders = _holders(optimizer)
    by_name = [value for value in holders if _holds_by_name(value, own)]
    for value in holders:
        if isinstance(value, MutableMapping):
            params = next((params for params in by_name if _are_copies_by_name(value, params)), None)
            found += (
                _copies_by_key(value, own, leaves_out)
                if params is None
                else [(value, *item) for item in params.items()]
            )
        elif isinstance(value, list):
            found += _copies_in_list(value, columns, own)
    return found


def _copies_by_key(
    mapping: MutableMapping[Any, Any], own: Mapping[int, Tensor], leaves_out: Callable[[Any, Tensor], bool]
) -> Iterator[tuple[Any, Any, Tensor]]:
    """Yield what a mapping has for parameters, which are its keys, or whose ids are."""
    for key in mapping:
        param = key if isinstance(key, Tensor) else own.get(key) if type(key) is int else None
        if param is not None and not leaves_out(mapping, param):
            yield from ((place, name, param) for place, name in _beside(param, mapping, key))


def _copies_in_list(
    values: list[Any], columns: list[list[Tensor]], own: Mapping[int, Tensor]
) -> Iterator[tuple[Any, Any, Tensor]]:
    """Yield what a list has for parameters: in the order of a group, or in pairs with them."""
    column = next((params for params in columns if _are_copies(values, params)), [])
    yield from ((values, index, param) for index, param in enumerate(column))
    for index in range(len(values)):
        yield from _copies_in_pair(values, index, own)


def _holds_by_name(value: Any, own: Mapping[int, Tensor]) -> bool:
    """Return whether a mapping has parameters by their names."""
    is_mapping = isinstance(value, Mapping) and bool(value)
    return is_mapping and all(type(name) is str and id(part) in own for name, part in value.items())


def _are_copies_by_name(value: Mapping[Any, Any], params: Mapping[str, Tensor]) -> bool:
    return value.keys() == params.keys() and all(_is_copy(value[name], param) for name, param in params.items())


class _InTuple:
    """The places of a tuple in a list."""

    def __init__(self, outer: list[Any], index: int) -> None:
        self._outer, self._index = outer, index

    def __getitem__(self, place: int) -> Any:
        return self._outer[self._index][place]

    def __setitem__(self, place: int, part: Any) -> None:
        before = self._outer[self._index]
        parts = [*before[:place], part, *before[place + 1 :]]
        self._outer[self._index] = type(before)(*parts) if hasattr(before, "_fields") else type(before)(parts)


def _copies_in_pair(outer: list[Any], index: int, own: Mapping[int, Tensor]) -> Iterator[tuple[Any, Any, Tensor]]:
    """Yield the copies of one parameter that stand in a tuple with it."""
    pair = outer[index]
    params = [part for part in pair if id(part) in own] if isinstance(pair, tuple) else []
    if len(params) == 1:
        places = [place for place, part in enumerate(pair) if id(part) not in own and _is_copy(part, params[0])]
        yield from ((_InTuple(outer, index), place, params[0]) for place in places)


def flat_copy_in(optimizer: Optimizer) -> bool:
    """Return whether an optimizer keeps a vector of all its parameters, or of those of a group."""
    columns = _columns(optimizer)
    lengths = {sum(param.numel() for param in params) for params in columns if len(params) > 1}
    own = {id(param) for params in columns for param in params}
    found = [part for value in _without_copies(optimizer, columns) for part in _parts(value) or ()]
    vectors = [part for part in found if isinstance(part, Tensor) and part.dim() == 1 and id(part) not in own]
    return any(vector.numel() in lengths for vector in vectors)


def _without_copies(optimizer: Optimizer, columns: list[list[Tensor]]) -> list[Any]:
    """Return what may hold tensors, but for what is beside parameters."""
    holders = _holders(optimizer)
    beside: dict[int, Any] = {}
    for value in holders:
        if isinstance(value, Mapping) and any(isinstance(key, Tensor) for key in value):
            _search(value, beside)
        elif isinstance(value, list) and any(_are_copies(value, params) for params in columns):
            beside[id(value)] = value
    return [value for value in holders if id(value) not in beside]


def _columns(optimizer: Optimizer) -> list[list[Tensor]]:
    """Return the parameters of each group, and those of all."""
    groups = [group["params"] for group in optimizer.param_groups]
    return [params for params in (*groups, [param for params in groups for param in params]) if params]


def _holders(optimizer: Optimizer) -> list[Any]:
    """Return everything in an optimizer that may hold tensors."""
    found: dict[int, Any] = {}
    _search(optimizer, found)
    return list(found.values())


def _beside(param: Tensor, place: MutableMapping[Any, Any], name: Any) -> Iterator[tuple[Any, Any]]:
    part = place[name]
    if isinstance(part, MutableMapping):
        for inner in part:
            yield from _beside(param, part, inner)
    elif _is_copy(part, param):
        yield place, name


def _are_copies(values: list[Any], params: list[Tensor]) -> bool:
    return len(values) == len(params) and all(map(_is_copy, values, params))


def _is_copy(value: Any, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value is not param and value.shape == param.shape


def copy_onto(optimizer: Optimizer, stand_ins: Mapping[int, Tensor]) -> Any:
    """Copy an optimizer with everything that it holds, for other parameters, given by the addresses of its own.

    State and the hooks of steps are left out. Return None if it holds what cannot be copied, such as a model.
    """
    memo: dict[int, Any] = dict(stand_ins)
    for place, name, param in _copies_in(optimizer):
        memo[id(place[name])] = stand_ins[id(param)].detach().clone()
    try:
        return _copied(optimizer, memo)
    except _CannotCopyError:
        return None


class _CannotCopyError(Exception):
    pass


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if id(value) not in memo:
        made: Any = value
        if isinstance(value, Tensor):
            made = value.detach().clone()
        elif isinstance(value, (dict, list, set, deque)):
            return _copied_container(value, memo)
        elif isinstance(value, (tuple, frozenset)):
            parts = [_copied(part, memo) for part in value]
            made = type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        elif isinstance(value, MethodType):
            made = MethodType(value.__func__, _copied(value.__self__, memo))
        elif isinstance(value, (nn.Module, partial, ref)) or _holds_more(value):
            raise _CannotCopyError
        elif _is_open(value):
            made = memo[id(value)] = object.__new__(type(value))
            _copy_attributes(value, made, memo)
        memo[id(value)] = made
    return memo[id(value)]


def _copy_attributes(value: Any, made: Any, memo: dict[int, Any]) -> None:
    slots = {slot.__name__: slot for slot in _slots_of(type(value))}
    for name, part in _own_attributes(value).items():
        if name in slots:
            slots[name].__set__(made, _copied(part, memo))
        else:
            made.__dict__[name] = _copied(part, memo)


def _holds_more(value: Any) -> bool:
    """Return whether a function holds what a copy of it would share."""
    return isinstance(value, FunctionType) and (bool(value.__closure__) or any(True for _ in _defaults_of(value)))


def _copied_container(value: Any, memo: dict[int, Any]) -> Any:
    made = memo[id(value)] = copy(value)
    made.clear()
    if isinstance(value, dict):
        made.update([(_copied(key, memo), _copied(part, memo)) for key, part in value.items()])
    else:
        (made.update if isinstance(value, set) else made.extend)([_copied(part, memo) for part in value])
    return made


def _own_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object; those of an optimizer without its state and what others hang on it."""
    own = _attributes(value)
    if not isinstance(value, Optimizer):
        return own
    own.pop("step", None)  # a scheduler's, which counts steps
    return own | {"_optimizer_step_pre_hooks": {}, "_optimizer_step_post_hooks": {}, "state": defaultdict(dict)}
