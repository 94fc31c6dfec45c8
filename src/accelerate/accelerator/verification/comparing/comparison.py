"""Compare the recordings of a mesh with those of one process.

A fault is a difference beyond rounding in what training depends on: initial values, losses, gradients, the norm, the
gradients after clipping, learning rates, and the parameters after the step. Inputs, outputs and gradients of modules
only serve to find where it begins (`calls`), because a rank may hold them in a layout that nobody describes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from ..recording.data import Recording, Step, Tensors
from .calls import Calls
from .causes import cause_of
from .findings import Finding, common_ratio, deviation, limit_of, ratio_of, relative, size_of
from .panel import panel

_SMALL = 1e-3
"""Gradients that are smaller than this beside the largest one are compared on its scale."""


@dataclass(kw_only=True)
class Comparison:
    """The result: equal, or the first difference."""

    sizes: dict[str, int]
    processes: int
    steps: int
    first: Finding | None = None
    notes: list[Finding] = field(default_factory=list)
    """What is not wrong and probably not meant."""
    values: int = 0
    """Losses, norms and tensors that were compared."""
    largest: dict[str, float] = field(default_factory=dict)
    """Of losses, gradients, norm and parameters: the largest difference in the first step."""

    @property
    def equal(self) -> bool:
        """Return whether nothing differs beyond rounding."""
        return self.first is None

    def __str__(self) -> str:
        return panel(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, for JSON."""
        return {"equal": self.equal, **asdict(self)}


def compare(mesh: Sequence[Recording], one: Recording, reordered: Recording) -> Comparison:
    """Compare a mesh with one process; `reordered` measures rounding."""
    steps = min(len(recording.steps) for recording in (*mesh, one, reordered))
    result = Comparison(sizes=mesh[0].sizes, processes=len(mesh), steps=steps)
    values = _Values(mesh, one, reordered, result)
    found = values.initial() or next(filter(None, map(values.of_step, range(steps))), None)
    unequal_masks, equal_masks = dropouts(mesh)
    if found is not None:
        found.kind = found.kind or one.classes.get(found.module, "")
        found.cause = cause_of(found, mesh, one)
    result.first = found or unequal_masks
    result.notes += [equal_masks] if equal_masks is not None else []
    return result


class _Values:
    """What training depends on, of the mesh and of one process."""

    def __init__(self, mesh: Sequence[Recording], one: Recording, reordered: Recording, result: Comparison) -> None:
        self.mesh = mesh
        self.one = one
        self.reordered = reordered
        self.result = result

    def initial(self) -> Finding | None:
        """Compare parameters and buffers as they were after `prepare`."""
        return self._tensors("initial value", 0, [r.initial for r in self.mesh], self.one.initial, self.one.initial)

    def of_step(self, index: int) -> Finding | None:
        """Compare one step, and find where a difference begins."""
        mesh = [recording.steps[index] for recording in self.mesh]
        one, other = self.one.steps[index], self.reordered.steps[index]

        def tensors(what: str, of: Callable[[Step], Tensors]) -> Finding | None:
            return self._tensors(what, index, [of(step) for step in mesh], of(one), of(other))

        found = self._losses(index, mesh, one, other) or tensors("gradient", lambda step: step.gradients)
        if found is not None:
            calls = Calls(self.mesh, self.one, self.reordered, index)
            return calls.first_output() or (calls.first_gradient(found) if found.what == "gradient" else found)
        return (
            self._norm(index, mesh, one, other)
            or tensors("clipping", lambda step: step.clipped)
            or self._rates(index, mesh, one)
            or tensors("parameter", lambda step: step.parameters)
        )

    def _losses(self, index: int, mesh: list[Step], one: Step, other: Step) -> Finding | None:
        ranks = self.mesh[0].data_ranks
        found: Finding | None = None
        ratios = []
        for at in range(min(len(one.losses), len(other.losses), ranks * min(len(step.losses) for step in mesh))):
            sharing = [i for i, recording in enumerate(self.mesh) if recording.data_rank == at % ranks]
            seen = _loss_of([mesh[i] for i in sharing], [self.mesh[i] for i in sharing], at // ranks)
            limit = limit_of(relative(one.losses[at], other.losses[at]))
            difference = relative(one.losses[at], seen)
            ratios.append(seen / one.losses[at] if one.losses[at] else math.nan)
            self._count("losses", difference, index)
            if difference > limit and found is None:
                found = Finding(what="loss", module="", step=index + 1, ranks=[self.mesh[i].rank for i in sharing],
                                difference=difference, rounding=limit)  # fmt: skip
        if found is not None:
            found.ratio = common_ratio(ratios)
        return found

    def _norm(self, index: int, mesh: list[Step], one: Step, other: Step) -> Finding | None:
        if one.norm is None or other.norm is None:
            return None
        limit = limit_of(relative(one.norm, other.norm))
        for recording, step in zip(self.mesh, mesh, strict=True):
            if step.norm is None:  # clipped by other means
                continue
            difference = relative(one.norm, step.norm)
            self._count("norm", difference, index)
            if difference > limit:
                return Finding(what="norm", module="", step=index + 1, ranks=[recording.rank], difference=difference,
                               rounding=limit)  # fmt: skip
        return None

    def _rates(self, index: int, mesh: list[Step], one: Step) -> Finding | None:
        for recording, step in zip(self.mesh, mesh, strict=True):
            other_rates = set(step.rates) - set(one.rates)
            if other_rates:
                wrong, right = max(other_rates), max(one.rates, default=0.0)
                return Finding(what="learning rate", module="", step=index + 1, ranks=[recording.rank],
                               difference=relative(right, wrong), ratio=wrong / right if right else None)  # fmt: skip
        return None

    def _tensors(self, what: str, index: int, mesh: list[Tensors], one: Tensors, other: Tensors) -> Finding | None:
        """Compare full tensors by name. Of gradients, return the last that differs, which is computed first."""
        is_gradient = what in ("gradient", "clipping")
        least = _SMALL * max((size_of(tensor) for tensor in one.values()), default=0.0) if is_gradient else 0.0
        found: list[Finding] = []
        ratios: list[float] = []
        for name, expected in one.items():
            copies = {r.rank: values[name] for r, values in zip(self.mesh, mesh, strict=True) if name in values}
            limit = limit_of(deviation(expected, other.get(name, expected), least))
            tensor = self._tensor(what, name, expected, copies, limit, least)
            self._count(f"{what}s", tensor.difference, index)
            if tensor.difference > limit:
                tensor.step = index + 1
                found.append(tensor)
            if size_of(expected) > least:
                ratios += [ratio_of(expected, seen) for seen in copies.values()]
        if not found:
            return None
        chosen = found[-1] if what == "gradient" else found[0]
        chosen.ratio = common_ratio(ratios)
        return chosen

    def _tensor(
        self, what: str, name: str, expected: Tensor, copies: dict[int, Tensor], limit: float, least: float
    ) -> Finding:
        """Compare the copies of a tensor; one that no rank has is missing on all."""
        differences = {rank: deviation(expected, seen, least) for rank, seen in copies.items()}
        differences = differences or {recording.rank: math.inf for recording in self.mesh}
        is_cut = any(seen.shape != expected.shape for seen in copies.values())
        return Finding(
            what="shape" if is_cut else what,
            module=name.rpartition(".")[0],
            name=name,
            ranks=[rank for rank, difference in differences.items() if difference > limit],
            difference=max(differences.values()),
            rounding=limit,
        )

    def _count(self, what: str, difference: float, index: int) -> None:
        self.result.values += 1
        if index == 0:
            self.result.largest[what] = max(self.result.largest.get(what, 0.0), difference)


def _loss_of(steps: Sequence[Step], recordings: Sequence[Recording], number: int) -> float:
    """Return the loss of a data rank: the sum or the mean over those that share its sequences; others hold copies."""
    by_tokens: dict[tuple[int, int], float] = {}
    for step, recording in zip(steps, recordings, strict=True):
        coordinates = recording.coordinates
        by_tokens[coordinates.get("cp", 0), coordinates.get("sp", 0)] = step.losses[number]
    total = math.fsum(by_tokens.values())
    return total if steps[0].sums[number] else total / len(by_tokens)


def dropouts(mesh: Sequence[Recording]) -> tuple[Finding | None, Finding | None]:
    """Return a dropout whose masks must be equal and are not, and one whose masks are equal needlessly."""
    unequal = equal = None
    for drops in zip(*(recording.dropouts for recording in mesh), strict=False):
        for i, one in enumerate(drops):
            for j, other in enumerate(drops[:i]):
                ranks = [mesh[j].rank, mesh[i].rank]
                same_samples = mesh[i].data_rank == mesh[j].data_rank
                same_masks = one.generator == other.generator
                if same_samples and one.input == other.input and not same_masks:
                    unequal = unequal or Finding(what="dropout", module=one.module, ranks=ranks, cause=_UNEQUAL_MASKS)
                if not same_samples and one.input != other.input and same_masks:
                    equal = equal or Finding(what="dropout", module=one.module, ranks=ranks, cause=_EQUAL_MASKS)
    return unequal, equal


_UNEQUAL_MASKS = (
    "Ranks that hold copies of one activation draw different masks for it, so that the copies are no longer equal. "
    "Give all ranks that share samples the same seed: set_seed(seed), without the rank."
)
_EQUAL_MASKS = (
    "Ranks with different samples draw the same masks. That is not wrong, and less random than on one process: "
    "set_seed(seed, device_specific=True) gives every rank its own."
)
