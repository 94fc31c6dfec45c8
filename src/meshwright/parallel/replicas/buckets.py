"""Buckets of gradients: parameters whose gradients are reduced by one collective, in one flat buffer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedSettingError

_ALIGNMENT = 16
"""Elements: vectorised kernels of optimizers read gradients from multiples of this."""


class Bucket:
    """Parameters of one dtype and device, and the buffer in which their gradients are summed.

    The buffer has a view for each parameter. Numbers follow them: for each parameter 1 if it has a gradient on this
    rank, and `extra` numbers of the caller.
    """

    def __init__(self, params: Sequence[Tensor], extra: int = 0) -> None:
        self.params = list(params)
        self.extra = extra
        self.missing = set(range(len(self.params)))
        """Parameters whose gradient has not been computed in this backward pass."""
        self.work: Any = None
        """The reduction that is under way; None before it."""
        self._buffer: _Buffer | None = None
        self._reduced: _Reduced | None = None

    def allocate(self) -> None:
        """Take a new buffer: a reduction that was given up may still write into the old one."""
        self._buffer = _Buffer(self.params, self.extra)
        self.work = None

    def await_all(self) -> None:
        """Expect a gradient of every parameter."""
        self.missing.update(range(len(self.params)))
        self.work = None

    @torch.no_grad()
    def load(self, scale: float, numbers: Sequence[float] = ()) -> Tensor:
        """Copy the gradients times `scale`, and the caller's numbers, to the buffer; return what is to be summed."""
        assert self._buffer is not None, "the reducer has no group yet: call bind()"
        flat, views, marks = self._buffer.flat, self._buffer.views, self._buffer.marks
        gradients = [param.grad for param in self.params]
        present = [gradient for gradient in gradients if gradient is not None]
        is_complete = len(present) == len(gradients)
        try:
            if is_complete:
                torch._foreach_copy_(views, present)
            else:
                for view, gradient in zip(views, gradients, strict=True):
                    if gradient is None:
                        view.zero_()
                    else:
                        view.copy_(gradient)
        except RuntimeError as error:
            raise _explained(error, present) from error
        if scale != 1.0:
            flat.mul_(scale)
        if is_complete and not any(numbers):
            marks.copy_(self._buffer.marks_of_all)
        else:
            used = [float(gradient is not None) for gradient in gradients]
            marks.copy_(torch.tensor([*used, *numbers], dtype=flat.dtype))
        return flat

    @property
    def numbers(self) -> list[float]:
        """The sums of the caller's numbers; valid when the reduction is complete."""
        assert self._buffer is not None
        return [float(number.real) for number in self._buffer.marks[len(self.params) :].tolist()]

    def store(self) -> None:
        """Make the sums the gradients of the parameters, and keep those of this rank alone until `release`.

        A parameter that no rank used keeps none.
        """
        assert self._buffer is not None
        own = [param.grad for param in self.params]
        views = self._buffer.views
        if all(gradient is not None for gradient in own):
            for param, view in zip(self.params, views, strict=True):
                param.grad = view
        else:
            users = self._buffer.marks.tolist()
            for param, view, gradient, count in zip(self.params, views, own, users, strict=False):
                if gradient is not None or count != 0:
                    param.grad = view
        self._reduced = _Reduced(self._buffer, own, self._buffer.flat._version)

    def restore(self) -> None:
        """Make the gradients independent of the buffer before a backward pass adds to them.

        Sums that nobody has changed become the gradients of this rank alone again, so that the next reduction sums what
        all backward passes have computed. Changed ones (zeroed, clipped) become copies.
        """
        if self._reduced is None:
            return
        buffer, own, version = self._reduced.buffer, self._reduced.own, self._reduced.version
        self._reduced = None
        untouched = own is not None and buffer.flat._version == version
        for index, (param, view) in enumerate(zip(self.params, buffer.views, strict=True)):
            if param.grad is view:
                param.grad = own[index] if own is not None and untouched else view.clone()

    def release(self) -> None:
        """Forget the gradients of this rank alone: the optimizer has made its step."""
        if self._reduced is not None:
            self._reduced.own = None


class _Buffer:
    """A flat buffer, its views, and the numbers at its end."""

    def __init__(self, params: Sequence[Tensor], extra: int) -> None:
        offsets = []
        size = 0
        for param in params:
            offsets.append(size)
            size += -(-param.numel() // _ALIGNMENT) * _ALIGNMENT
        self.flat = torch.zeros(size + len(params) + extra, dtype=params[0].dtype, device=params[0].device)
        self.views = [
            self.flat.as_strided(param.size(), torch.empty_like(param, device="meta").stride(), offset)
            for param, offset in zip(params, offsets, strict=True)
        ]
        self.marks = self.flat[size:]
        self.marks_of_all = torch.ones_like(self.marks)
        self.marks_of_all[len(params) :] = 0


@dataclass
class _Reduced:
    """Gradients that a reduction has replaced."""

    buffer: _Buffer
    own: list[Tensor | None] | None
    """The gradients of this rank alone; None once they are released."""
    version: int
    """How often the buffer had been changed when the reduction was complete."""


def buckets_of(parameters: Iterable[Tensor], first_bytes: int, bytes_per_bucket: int, extra: int) -> list[Bucket]:
    """Divide parameters into buckets, in the order in which a backward pass usually completes them.

    That is the reverse order of the parameters. The first bucket of a dtype and device is small, so that communication
    begins early. The last bucket carries `extra` numbers.
    """
    open_parts: dict[Any, _Part] = {}
    full: list[_Part] = []
    limits: dict[Any, int] = {}
    for place, param in enumerate(reversed(list(parameters))):
        form = param.dtype, param.device
        part = open_parts.setdefault(form, _Part())
        part.params.append(param)
        part.bytes += param.nbytes
        part.place = place
        if part.bytes >= limits.get(form, first_bytes):
            full.append(open_parts.pop(form))
            limits[form] = bytes_per_bucket
    parts = sorted([*full, *open_parts.values()], key=lambda part: part.place)
    return [Bucket(part.params, extra if part is parts[-1] else 0) for part in parts]


@dataclass
class _Part:
    """Parameters of a bucket to be."""

    params: list[Tensor] = field(default_factory=list)
    bytes: int = 0
    place: int = 0
    """The place of the last parameter in the order of all."""


def _explained(error: RuntimeError, gradients: Sequence[Tensor]) -> Exception:
    if any(gradient.is_sparse for gradient in gradients):
        return UnsupportedSettingError(
            "A sparse gradient",
            "gradients are reduced in flat buffers here.",
            "Make the embedding with sparse=False.",
        )
    return error
