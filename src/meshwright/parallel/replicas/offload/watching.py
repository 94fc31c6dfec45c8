"""A gradient that tells when somebody writes to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....runtime.collectives.nested import tensors_of

_SETTERS = ("__set__", "__setitem__", "__delitem__")
_EXPOSING = ("numpy", "__array__", "__dlpack__", "data_ptr", "storage", "untyped_storage")
"""What returns the memory of a tensor in another form: nothing tells when somebody writes to that."""


class Watch:
    """What a gradient and its other views have in common."""

    def __init__(self, on_access: Callable[[bool], None]) -> None:
        self.on_access: Callable[[bool], None] | None = on_access


class WatchedGradient(Tensor):
    """A gradient, or another view of it, that can be read as any other."""

    _watch: Watch

    @staticmethod
    def of(gradient: Tensor, on_access: Callable[[bool], None]) -> WatchedGradient:
        """Return a view of a gradient that calls `on_access(True)` before somebody writes to it.

        It calls `on_access(False)` before somebody gets its memory.
        """
        return _watched(gradient, Watch(on_access))

    def stop(self) -> None:
        """Call nothing any more."""
        self._watch.on_access = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch with watched gradients."""
        options = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            watched = [each for each in tensors_of((args, options)) if isinstance(each, cls)]
            exposed = args[:1] if name in _EXPOSING else ()
            for writes, targets in ((True, _targets(name, args, options)), (False, exposed)):
                for each in tensors_of(targets):
                    if isinstance(each, cls) and each._watch.on_access is not None:
                        each._watch.on_access(writes)
            result = func(*args, **options)
            return _map(result, lambda tensor: _as_view(tensor, watched))


def _targets(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> Sequence[Any]:
    """Return what a function writes to."""
    is_in_place = name.endswith("_") and not name.endswith("__")
    is_operator = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
    return [*(args[:1] if is_in_place or is_operator or name in _SETTERS else ()), options.get("out")]


def _as_view(tensor: Tensor, watched: Sequence[WatchedGradient]) -> Tensor:
    """Let a view of a watched gradient be watched, too."""
    for each in watched:
        if tensor is each:
            return tensor
        if tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() == each.untyped_storage().data_ptr():
            return _watched(tensor, each._watch)
    return tensor


def _watched(tensor: Tensor, watch: Watch) -> WatchedGradient:
    view = tensor.as_subclass(WatchedGradient)
    view._watch = watch
    return view


def _map(result: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(result, Tensor):
        return function(result)
    if type(result) in (list, tuple):
        return type(result)(_map(each, function) for each in result)
    return result
