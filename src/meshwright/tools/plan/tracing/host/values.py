"""Answer a script that asks fake tensors for their numbers, and write down where it asked.

[Note: known tensors] Tokens, masks, lengths and positions do not depend on parameters. Batches therefore keep their
whole numbers beside the fake tensors, and an operation whose inputs are all known is also computed. Where a
script chooses elements or asks for a number, the answer is then the real one.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from .answers import ANSWERS, WORDS

_aten = torch.ops.aten
_LIBRARIES = (str(Path(__file__).parents[4]), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
_LARGEST_KNOWN = 1 << 20
"""Elements of a tensor whose numbers are kept; computing with larger ones would take time."""
_LARGEST_KNOWN_MADE = 1 << 12
"""Elements of floats that a step makes of nothing, such as zeros."""
_PATIENCE = 1000
"""How often a line gets the same answer; a loop that waits for another ends then."""
_WITHOUT_NUMBERS = {
    _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
}  # fmt: skip
_FOUND_NOTHING = {_aten.isnan.default, _aten.isinf.default}
_FOUND_ALL = {_aten.isfinite.default}
_KEEP_ANSWER = {
    _aten.any.default, _aten.any.dim, _aten.all.default, _aten.all.dim, _aten.sum.default, _aten._to_copy.default,
    _aten.clone.default, _aten.detach.default, _aten.squeeze.default, _aten.view.default, _aten.select.int,
}  # fmt: skip


class Values:
    """Numbers that stand for those of fake tensors: 1 and True, but no infinity and no NaN is found.

    Shapes that depend on unknown numbers have their upper bound: every element of a mask is chosen.
    """

    def __init__(self, guesses: list[str]) -> None:
        self._guesses = guesses
        self._default: int | None = None
        self._times: dict[str, int] = {}
        self._known: Any = WeakTensorKeyDictionary()
        self._assumed: Any = WeakTensorKeyDictionary()

    def answer(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Return a number or a shape for what depends on data; NotImplemented for everything else."""
        if function not in ANSWERS or not isinstance(args[0], Tensor):
            return NotImplemented
        if not any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(args)):
            return _computed(function, args, kwargs)
        if getattr(args[0], "constant", None) is not None:
            return NotImplemented
        if function is _aten._pin_memory.default:
            return args[0]
        if function is _aten.index.Tensor and not _has_masks(args[1]):
            return NotImplemented
        known = self._numbers((args, kwargs))
        if known is not None:
            return self._faked(_computed(function, *known), args[0])
        return self._guess(function, args, kwargs)

    def _guess(self, function: Any, args: Any, kwargs: Any) -> Any:
        if function is _aten.masked_select.default and args[0].shape == args[1].shape:
            function, args = _aten.index.Tensor, (args[0], [args[1]])
        if function is _aten.index.Tensor:
            args = args[0], self._positions(args[1])
            if not _has_masks(args[1]):
                return function(*args)
        times = self._note(WORDS.get(function, function._overloadpacket.__name__)) if self._default is None else 0
        if function is _aten._local_scalar_dense.default:
            number = self._assumed.get(args[0], 1 if self._default is None else self._default)
            return _number(args[0].dtype, number if times < _PATIENCE else 1 - number)
        answer = ANSWERS[function]
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

    def keep(self, tensor: Tensor, numbers: Tensor) -> None:
        """Remember the numbers of a tensor of a batch, if they are whole or few."""
        is_whole = not (numbers.is_floating_point() or numbers.is_complex())
        if numbers.numel() <= (_LARGEST_KNOWN if is_whole else _LARGEST_KNOWN_MADE):
            self._known[tensor] = numbers

    def learn(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Remember the numbers of fake results where they are known."""
        if function.namespace != "aten":  # a collective may have written other ranks' numbers
            self._forget(leaf for leaf in tree_leaves(args) if isinstance(leaf, FakeTensor))
            return
        if function in _WITHOUT_NUMBERS:
            return
        if function._schema.is_mutable:
            self._learn_change(function, args, kwargs)
            return
        first = next((arg for arg in args if isinstance(arg, Tensor)), None)
        if isinstance(first, FakeTensor) and first not in self._known:
            self._assume(function, first, result)
            return
        self._learn_result(function, args, kwargs, result, first is None)

    def _learn_result(self, function: Any, args: Any, kwargs: Any, result: Any, is_made: bool) -> None:
        """Compute a result whose inputs are all known."""
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor)]
        if not outputs or not all(_is_worth_knowing(output, is_made) for output in outputs):
            return
        known = self._numbers((args, kwargs))
        if known is not None:
            for output, numbers in zip(tree_leaves(result), tree_leaves(_computed(function, *known)), strict=True):
                if isinstance(output, FakeTensor):
                    self._known[output] = numbers

    def read_by_python(self) -> None:
        """Let Python format fake tensors, and convert them to lists and arrays."""
        plain_format: Any = Tensor.__format__
        plain_list, plain_array = Tensor.tolist, Tensor.numpy

        def formatted(tensor: Tensor, spec: str) -> str:
            return str(plain_format(self._read(tensor, "printed a tensor"), spec))

        def listed(tensor: Tensor) -> Any:
            return plain_list(self._read(tensor, "read the numbers of a tensor"))

        def array(tensor: Tensor, *, force: bool = False) -> Any:
            return plain_array(self._read(tensor, "read the numbers of a tensor"), force=force)

        def array_of(tensor: Tensor, dtype: Any = None) -> Any:
            return np.asarray(array(tensor), dtype=dtype)

        Tensor.__format__, Tensor.tolist = formatted, listed  # type: ignore[method-assign, assignment]
        Tensor.numpy, Tensor.__array__ = array, array_of  # type: ignore[method-assign, assignment]

    def _read(self, tensor: Tensor, what: str) -> Tensor:
        """Return a tensor with numbers."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        known: Tensor | None = self._known.get(tensor)
        if known is not None:
            return known
        if self._default is None:
            self._note(what)
        with unset_fake_temporarily():
            return torch.full(tensor.shape, 1 if self._default is None else self._default, dtype=tensor.dtype)

    def _learn_change(self, function: Any, args: Any, kwargs: Any) -> None:
        """Change the numbers of a tensor that is changed in place, or forget them."""
        changed = args[0] if args and isinstance(args[0], FakeTensor) else None
        if changed is None or changed not in self._known:
            return
        known = self._numbers((args, kwargs))
        if known is not None:
            _computed(function, *known)
            return
        self._forget([changed])

    def _forget(self, changed: Iterable[FakeTensor]) -> None:
        """Forget the numbers of tensors, and of all others in the same memory."""
        storages = {tensor.untyped_storage()._cdata for tensor in changed if tensor in self._known}
        for tensor in [t for t in self._known if t.untyped_storage()._cdata in storages] if storages else ():
            del self._known[tensor]

    def _assume(self, function: Any, first: Tensor, result: Any) -> None:
        """Find neither NaN nor infinity."""
        if function in _FOUND_NOTHING or function in _FOUND_ALL:
            self._assumed[result] = function in _FOUND_ALL
        elif function in _KEEP_ANSWER and first in self._assumed:
            self._assumed[result] = self._assumed[first]
        elif function is _aten.logical_not.default and first in self._assumed:
            self._assumed[result] = not self._assumed[first]

    def _numbers(self, arguments: Any) -> Any:
        """Return arguments with the numbers of their tensors; None if some are not known."""
        unknown = False

        def numbers(leaf: Any) -> Any:
            nonlocal unknown
            if not isinstance(leaf, FakeTensor):
                unknown |= isinstance(leaf, Tensor) and leaf.numel() > _LARGEST_KNOWN
                return leaf
            known = leaf.constant if leaf.constant is not None else self._known.get(leaf)
            unknown |= known is None
            return known

        found = tree_map(numbers, arguments)
        return None if unknown else found

    def _positions(self, indices: list[Tensor | None]) -> list[Tensor | None]:
        """Return indices with known masks replaced by the positions of what they choose."""
        positions: list[Tensor | None] = []
        for index in indices:
            known = None if index is None or index.dtype is not torch.bool else self._numbers(index)
            if known is None:
                positions.append(index)
            else:
                positions += [self._faked(part, index) for part in _computed(_aten.nonzero_numpy, (known,), {})]
        return positions

    def _faked(self, result: Any, like: Any) -> Any:
        def hide(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            with like.fake_mode:
                hidden = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)
            self._known[hidden] = leaf
            return hidden

        return tree_map(hide, result) if isinstance(like, FakeTensor) else result

    def _note(self, words: str) -> int:
        """Write down that a line asked, and return how often it did before."""
        frame = user_frame()
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "a library"
        what = f"{where} {words}"
        if what not in self._guesses:
            self._guesses.append(what)
        self._times[what] = times = self._times.get(what, -1) + 1
        return times


def user_frame() -> FrameType | None:
    """Return the innermost frame that is the script's, or belongs to neither Python, a package nor this library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_foreign(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _is_foreign(file: str) -> bool:
    return file != sys.argv[0] and file.startswith((*_LIBRARIES, "<"))  # packages have scripts too


def _is_worth_knowing(tensor: Tensor, is_made: bool) -> bool:
    largest = _LARGEST_KNOWN_MADE if is_made and tensor.is_floating_point() else _LARGEST_KNOWN
    return tensor.device.type != "meta" and tensor.numel() <= largest


def _has_masks(indices: Any) -> bool:
    return any(index is not None and index.dtype is torch.bool for index in indices)


def _computed(function: Any, args: Any, kwargs: Any) -> Any:
    with unset_fake_temporarily(), torch.no_grad():
        return function(*args, **kwargs)


def _number(dtype: torch.dtype, known: int) -> Any:
    if dtype is torch.bool:
        return bool(known)
    return float(known) if dtype.is_floating_point else int(known)
