"""Measure rounding: the same operations with another order of summation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten: Any = torch.ops.aten


class OtherOrderOfSummation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Compute every matrix product and convolution as the sum of two halves of its summation dimension.

    Tensor parallelism does exactly this, and every other way of distributing a model changes some order of summation.
    So the deviation of such a run from a plain one is what rounding may cause.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, in two halves if it is a product."""
        in_halves = _IN_HALVES.get(func)
        result = None if in_halves is None or kwargs else in_halves(*args)
        return func(*args, **(kwargs or {})) if result is None else result


def _sum_of_halves(product: Any, left: Tensor, right: Tensor) -> Tensor | None:
    middle = left.shape[-1] // 2
    if middle == 0:
        return None
    first = product(left[..., :middle], right[..., :middle, :])
    return first + product(left[..., middle:], right[..., middle:, :])  # type: ignore[no-any-return]


def _mm(left: Tensor, right: Tensor) -> Tensor | None:
    return _sum_of_halves(aten.mm, left, right)


def _bmm(left: Tensor, right: Tensor) -> Tensor | None:
    return _sum_of_halves(aten.bmm, left, right)


def _addmm(bias: Tensor, left: Tensor, right: Tensor) -> Tensor | None:
    product = _mm(left, right)
    return None if product is None else product + bias


def _convolution(image: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor | None:
    transposed, groups = options[3], options[5]
    middle = weight.shape[1] // 2
    if transposed or groups != 1 or middle == 0:
        return None
    first = aten.convolution(image[:, :middle], weight[:, :middle], bias, *options)
    return first + aten.convolution(image[:, middle:], weight[:, middle:], None, *options)  # type: ignore[no-any-return]


_IN_HALVES: dict[Any, Callable[..., Tensor | None]] = {
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    aten.addmm.default: _addmm,
    aten.convolution.default: _convolution,
}
