"""Answer a script that asks tensors without data for their numbers, and write down where it asked."""

from __future__ import annotations

import math
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_aten = torch.ops.aten
_LIBRARIES = (str(Path(__file__).parents[3]), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
_FOUND_NOTHING = {_aten.isnan.default, _aten.isinf.default}
_FOUND_ALL = {_aten.isfinite.default}
_KEEP_ANSWER = {
    _aten.any.default, _aten.any.dim, _aten.all.default, _aten.all.dim, _aten.sum.default, _aten._to_copy.default,
    _aten.clone.default, _aten.detach.default, _aten.squeeze.default, _aten.view.default, _aten.select.int,
}  # fmt: skip


class Values:
    """Numbers that stand for those of tensors without data: 1 and True, but no infinity and no NaN is found.

    Shapes that depend on numbers have their upper bound: every element of a mask is chosen.
    """

    def __init__(self, guesses: list[str]) -> None:
        self._guesses = guesses
        self._default = 1
        self._known: WeakKeyDictionary[Tensor, bool] = WeakKeyDictionary()

    def answer(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Return a number or a shape for what depends on data; NotImplemented for everything else."""
        if function not in _ANSWERS or not isinstance(args[0], FakeTensor) or args[0].constant is not None:
            return NotImplemented
        if function is _aten._pin_memory.default:
            return args[0]
        if function is _aten.index.Tensor and not any(i is not None and i.dtype is torch.bool for i in args[1]):
            return NotImplemented
        if self._default:
            self._note(function)
        if function is _aten._local_scalar_dense.default:
            return _number(args[0].dtype, self._known.get(args[0], self._default))
        answer = _ANSWERS[function]
        assert answer is not None
        return answer(*args, **kwargs)

    @contextmanager
    def standing_for(self, number: int) -> Iterator[None]:
        """Answer with another number, and do not write it down: the library itself asks."""
        before, self._default = self._default, number
        try:
            yield
        finally:
            self._default = before

    def learn(self, function: Any, args: Any, result: Any) -> None:
        """Remember results that are known without data."""
        if function in _FOUND_NOTHING or function in _FOUND_ALL:
            self._known[result] = function in _FOUND_ALL
        elif function in _KEEP_ANSWER and isinstance(args[0], FakeTensor) and args[0] in self._known:
            self._known[result] = self._known[args[0]]
        elif function is _aten.logical_not.default and args[0] in self._known:
            self._known[result] = not self._known[args[0]]

    def _note(self, function: Any) -> None:
        frame = user_frame()
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "a library"
        what = f"{where} {_WORDS.get(function, function._overloadpacket.__name__)}"
        if what not in self._guesses:
            self._guesses.append(what)


def user_frame() -> FrameType | None:
    """Return the innermost frame that belongs to neither Python, torch, an installed package nor this library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename.startswith(_LIBRARIES) or frame.f_code.co_filename.startswith("<")
    ):
        frame = frame.f_back
    return frame


def _number(dtype: torch.dtype, known: int) -> Any:
    if dtype is torch.bool:
        return bool(known)
    return float(known) if dtype.is_floating_point else int(known)


def _nonzero(tensor: Tensor) -> Tensor:
    return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)


def _masked_select(tensor: Tensor, mask: Tensor) -> Tensor:
    return tensor.new_empty((math.prod(_aten.broadcast_tensors([tensor, mask])[0].shape),))


def _unique(tensor: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    counts = tensor.new_empty((tensor.numel(),), dtype=torch.int64)
    return tensor.new_empty((tensor.numel(),)), tensor.new_empty(tensor.shape, dtype=torch.int64), counts


def _index(tensor: Tensor, indices: list[Tensor | None]) -> Any:
    """Index with masks replaced by the positions of all of their elements."""
    positions: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            positions += [index.new_empty((index.numel(),), dtype=torch.int64) for _ in range(index.dim())]
        else:
            positions.append(index)
    return _aten.index.Tensor(tensor, positions)


def _equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape


_ANSWERS: dict[Any, Callable[..., Any] | None] = {
    _aten._local_scalar_dense.default: None,
    _aten._pin_memory.default: None,
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
    _aten._unique2.default: _unique,
    _aten.equal.default: _equal,
    _aten.index.Tensor: _index,
}
_WORDS = {
    _aten._local_scalar_dense.default: "asked for a number of a tensor",
    _aten.index.Tensor: "chose elements by a mask",
    _aten.nonzero.default: "chose elements by a mask",
    _aten.masked_select.default: "chose elements by a mask",
    _aten._unique2.default: "asked for unique elements",
    _aten.equal.default: "compared two tensors",
}
