"""A difference between a mesh and one process, and how differences are measured.

[Note: rounding] The second run of one process had the same inputs and another order of summation. For each tensor, its
deviation from the first run is what rounding does to this tensor in this model. A mesh may add in several other orders,
so it is allowed `_ORDERS` times as much, and never less than the rounding of single numbers in a sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

_ORDERS = 32
_ROUNDING_OF_SUMS = 4 * torch.finfo(torch.float32).eps
_TINY = 1e-30


@dataclass(kw_only=True)
class Finding:
    """A difference between the mesh and one process."""

    what: str
    """initial value, input, output, loss, input gradient, gradient, norm, clipping, learning rate, parameter, shape,
    dropout, samples or calls."""
    module: str
    """Its name in the user's model; "" for the model itself."""
    kind: str = ""
    """The module's class."""
    name: str = ""
    """The parameter, or the place of the tensor in the module's output."""
    step: int = 1
    ranks: list[int] = field(default_factory=list)
    difference: float = math.inf
    """The largest deviation, relative to the largest value."""
    rounding: float = 0.0
    """What rounding may cause, measured."""
    ratio: float | None = None
    """The factor between the mesh's values and those of one process, if there is one for all."""
    between: str = ""
    """The module inside `module` whose input already differs, though no module before it does."""
    cause: str = ""


def size_of(tensor: Tensor) -> float:
    """Return the largest absolute value."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def deviation(expected: Tensor, seen: Tensor, least: float = 0.0) -> float:
    """Return the largest difference, relative to the largest value or to `least`."""
    if expected.shape != seen.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    difference = size_of(expected.double() - seen.double())
    if math.isnan(difference):
        return math.inf
    return difference / max(size_of(expected.double()), least, _TINY) if difference else 0.0


def relative(expected: float, seen: float) -> float:
    """Return the difference of two numbers, relative to the first."""
    difference = abs(expected - seen)
    return math.inf if math.isnan(difference) else difference / max(abs(expected), _TINY) if difference else 0.0


def limit_of(rounding: float) -> float:
    """Return the largest deviation that counts as rounding. See [Note: rounding]."""
    return _ORDERS * max(rounding, _ROUNDING_OF_SUMS)


def ratio_of(expected: Tensor, seen: Tensor) -> float:
    """Return the factor that fits best between two tensors."""
    if expected.shape != seen.shape:
        return math.nan
    one, other = expected.double().flatten(), seen.double().flatten()
    return float(torch.dot(one, other) / torch.dot(one, one).clamp(min=1e-60))


def common_ratio(ratios: Sequence[float]) -> float | None:
    """Return the factor that all values have in common, if it is a number of processes or micro-batches."""
    if not ratios or not all(ratio > 0 for ratio in ratios):
        return None
    ratio = ratios[0]
    count = max(ratio, 1 / ratio)
    is_count = round(count) >= 2 and abs(count - round(count)) <= 1e-3 * count
    return ratio if is_count and max(ratios) - min(ratios) <= 1e-3 * ratio else None
