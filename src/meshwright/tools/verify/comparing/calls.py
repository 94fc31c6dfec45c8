"""The way of the data through a model, on a mesh and on one process, and the module where a difference begins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..recording.data import Call, Recording
from .findings import Finding, deviation, limit_of, ratio_of, size_of
from .layouts import TensorPart, joined

Key = tuple[str, int]
"""A module's name, and a forward pass of the step."""


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """A forward pass of one data rank."""

    number: int
    data_rank: int


class Calls:
    """The calls of modules in one step."""

    def __init__(
        self, mesh: Sequence[Recording], one: Sequence[Recording], reordered: Sequence[Recording], index: int
    ) -> None:
        self._mesh = mesh
        self._index = index
        self._expected = [_by_key(recording.steps[index].calls) for recording in one]
        self._reordered = [_by_key(recording.steps[index].calls) for recording in reordered]
        self._seen = [_by_key(recording.steps[index].calls) for recording in mesh]

    def first_output(self) -> Finding | None:
        """Return the first module, in the order in which modules return, whose output differs; before it, the input."""
        for each in self._passes():
            wrong_input = self._compare(("", each.number), each, "inputs")
            if wrong_input is not None:
                return replace(wrong_input, what="input")
            for key in self._keys(each):
                found = self._compare(key, each, "outputs")
                if found is not None:
                    if key[0] and self._compare(key, each, "inputs") is not None:
                        return replace(found, module=key[0].rpartition(".")[0], kind="", between=key[0])
                    return found
        return None

    def first_gradient(self, found: Finding) -> Finding:
        """Return the module nearest to the loss that receives a right gradient and passes on a wrong one."""
        if found.ratio is not None:
            return replace(found, module="", kind="")
        for each in self._passes():
            scale = self._scale(each)
            place = self._nearest_to_loss(each, scale, "")
            while place is not None:
                inner = self._nearest_to_loss(each, scale, place.module)
                if inner is None:
                    return place
                place = inner
        return found

    def _nearest_to_loss(self, each: _Pass, scale: float, inside: str) -> Finding | None:
        for key in reversed(self._keys(each)):
            is_inside = key[0] and (not inside or key[0].startswith(f"{inside}."))
            if is_inside and self._compare(key, each, "output_gradients", scale) is None:
                place = self._compare(key, each, "input_gradients", scale)
                if place is not None:
                    return replace(place, what="input gradient")
        return None

    def _scale(self, each: _Pass) -> float:
        """Return the factor between the gradients of activations: a rank's loss has not been averaged yet."""
        for key in reversed(self._keys(each)):
            for label, expected in self._expected[each.data_rank][key][0].output_gradients.items():
                copies = self._copies(key, each, "output_gradients", label, expected)
                if copies and size_of(expected) > 0:
                    return ratio_of(expected, copies[0])
        return 1.0

    def _passes(self) -> Iterator[_Pass]:
        numbers = {number for expected in self._expected for _, number in expected}
        for number in sorted(numbers):
            for data_rank in range(len(self._expected)):
                yield _Pass(number=number, data_rank=data_rank)

    def _keys(self, each: _Pass) -> list[Key]:
        return [key for key in self._expected[each.data_rank] if key[1] == each.number]

    def _compare(self, key: Key, each: _Pass, tensors: str, scale: float = 1.0) -> Finding | None:
        """Compare what a call received or returned; where the parts of ranks do not fit together, it is left out."""
        if key not in self._expected[each.data_rank]:
            return None
        call = self._expected[each.data_rank][key][0]
        again = self._reordered[each.data_rank].get(key, [call])[0]
        for label, expected in getattr(call, tensors).items():
            copies = self._copies(key, each, tensors, label, expected)
            if copies is None and key[0] == "" and tensors == "inputs":
                copies = [expected.new_empty(0)]  # whole batches: another shape is a fault
            limit = limit_of(deviation(expected, getattr(again, tensors).get(label, expected)))
            difference = max((deviation(expected * scale, copy) for copy in copies or ()), default=0.0)
            if difference > limit:
                ranks = [recording.rank for recording in self._mesh if recording.data_rank == each.data_rank]
                name = label[len("[0]") :] if tensors.startswith("input") else label  # of (args, kwargs)
                return Finding(what="output", module=call.module, kind=call.kind, name=name, step=self._index + 1,
                               ranks=ranks, difference=difference, rounding=limit)  # fmt: skip
        return None

    def _copies(self, key: Key, each: _Pass, tensors: str, label: str, expected: Tensor) -> list[Tensor] | None:
        """Return the copies of a tensor on the mesh, each put together from its parts."""
        parts = []
        for recording, seen in zip(self._mesh, self._seen, strict=True):
            calls = seen.get(key, [])
            found: list[Any] = [getattr(call, tensors).get(label) for call in calls]
            if recording.data_rank != each.data_rank or not found or any(tensor is None for tensor in found):
                continue
            tensor = found[0] if len(found) == len(self._expected[each.data_rank][key]) else _concatenated(found)
            if tensor is None:
                return None
            split = recording.coordinates.get("tp", 0)
            parts.append(TensorPart(tensor=tensor, split=split, positions=calls[0].positions))
        return joined(parts, expected.shape) if parts else []


def _by_key(calls: Iterable[Call]) -> dict[Key, list[Call]]:
    """Return the calls by module and pass, in the order in which they returned."""
    found: dict[Key, list[Call]] = {}
    for call in calls:
        found.setdefault((call.module, call.number), []).append(call)
    return found


def _concatenated(tensors: Sequence[Tensor]) -> Tensor | None:
    """Put the micro-batches of a pipeline together."""
    if any(tensor.dim() == 0 or tensor.shape[1:] != tensors[0].shape[1:] for tensor in tensors):
        return None
    return torch.cat(list(tensors))
