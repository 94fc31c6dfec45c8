"""Compare the recordings of a mesh with those of one process.

A fault is a difference beyond rounding in what training depends on: initial values, losses, gradients, the norm, the
gradients after clipping, learning rates, and the parameters after the step. Inputs, outputs and gradients of modules
only serve to find where it begins (`calls`), because a rank may hold them in a layout that nobody describes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from torch import Tensor

from ..recording.data import RecordedStep, Recording, Tensors
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


def compare(mesh: Sequence[Recording], one: Sequence[Recording], reordered: Sequence[Recording]) -> Comparison:
    """Compare a mesh with processes that each do the work of one data rank; `reordered` measures rounding."""
    steps = min(len(recording.steps) for recording in (*mesh, *one, *reordered))
    result = Comparison(sizes=mesh[0].sizes, processes=len(mesh), steps=steps)
    values = _Values(mesh, one, reordered, result)
    found = values.initial() or next(filter(None, map(values.of_step, range(steps))), None)
    unequal_masks, equal_masks = dropouts(mesh)
    if found is not None:
        found.kind = found.kind or one[0].classes.get(found.module, "")
        found.cause = cause_of(found, mesh, one[0])
    result.first = found or repeated_samples(mesh) or unequal_masks
    result.notes += [equal_masks] if equal_masks is not None else []
    return result


class _Values:
    """What training depends on, of the mesh and of one process."""

    def __init__(
        self, mesh: Sequence[Recording], one: Sequence[Recording], reordered: Sequence[Recording], result: Comparison
    ) -> None:
        self.mesh = mesh
        self.one = one
        self.reordered = reordered
        self.result = result

    def initial(self) -> Finding | None:
        """Compare parameters and buffers as they were after `prepare`."""
        return self._tensors("initial value", 0, lambda recording: recording.initial)

    def of_step(self, index: int) -> Finding | None:
        """Compare one step, and find where a difference begins."""

        def tensors(what: str, of: Callable[[RecordedStep], Tensors]) -> Finding | None:
            return self._tensors(what, index, lambda recording: of(recording.steps[index]))

        found = self._losses(index) or tensors("gradient", lambda step: step.gradients)
        if found is not None:
            calls = Calls(self.mesh, self.one, self.reordered, index)
            return calls.first_output() or (calls.first_gradient(found) if found.what == "gradient" else found)
        return (
            self._norm(index)
            or tensors("clipping", lambda step: step.clipped)
            or self._rates(index)
            or tensors("parameter", lambda step: step.parameters)
        )

    def _losses(self, index: int) -> Finding | None:
        found: Finding | None = None
        ratios = []
        for data_rank, (one, other) in enumerate(zip(self.one, self.reordered, strict=True)):
            sharing = [recording for recording in self.mesh if recording.data_rank == data_rank]
            steps = [recording.steps[index] for recording in sharing]
            losses = zip(one.steps[index].losses, other.steps[index].losses, strict=False)
            for number, (expected, again) in enumerate(islice(losses, min(len(step.losses) for step in steps))):
                seen = _loss_of(steps, sharing, number)
                limit = limit_of(relative(expected, again))
                difference = relative(expected, seen)
                ratios.append(seen / expected if expected else math.nan)
                self._count("losses", difference, index)
                if difference > limit and found is None:
                    found = Finding(what="loss", module="", step=index + 1, ranks=[r.rank for r in sharing],
                                    difference=difference, rounding=limit)  # fmt: skip
        if found is not None:
            found.ratio = common_ratio(ratios)
        return found

    def _norm(self, index: int) -> Finding | None:
        for recording in self.mesh:
            seen, (one, other) = recording.steps[index].norm, self._expected(recording)
            expected, again = one.steps[index].norm, other.steps[index].norm
            if seen is None or expected is None or again is None:  # clipped by other means
                continue
            limit = limit_of(relative(expected, again))
            difference = relative(expected, seen)
            self._count("norm", difference, index)
            if difference > limit:
                return Finding(what="norm", module="", step=index + 1, ranks=[recording.rank], difference=difference,
                               rounding=limit)  # fmt: skip
        return None

    def _rates(self, index: int) -> Finding | None:
        for recording in self.mesh:
            expected = self._expected(recording)[0].steps[index].rates
            other_rates = set(recording.steps[index].rates) - set(expected)
            if other_rates:
                wrong, right = max(other_rates), max(expected, default=0.0)
                return Finding(what="learning rate", module="", step=index + 1, ranks=[recording.rank],
                               difference=relative(right, wrong), ratio=wrong / right if right else None)  # fmt: skip
        return None

    def _tensors(self, what: str, index: int, of: Callable[[Recording], Tensors]) -> Finding | None:
        """Compare full tensors by name. Of gradients, return the last that differs, which is computed first."""
        is_gradient = what in ("gradient", "clipping")
        names = dict.fromkeys(name for recording in self.one for name in of(recording))
        sizes = (size_of(tensor) for recording in self.one for tensor in of(recording).values())
        least = _SMALL * max(sizes, default=0.0) if is_gradient else 0.0
        found: list[Finding] = []
        ratios: list[float] = []
        for name in names:
            pairs = self._pairs(name, of)
            limit = self._limit(name, of, least)
            tensor = self._tensor(what, name, pairs, limit, least)
            self._count(f"{what}s", tensor.difference, index)
            if tensor.difference > limit:
                tensor.step = index + 1
                found.append(tensor)
            ratios += [ratio_of(expected, seen) for expected, seen in pairs.values() if size_of(expected) > least]
        if not found:
            return None
        chosen = found[-1] if what == "gradient" else found[0]
        chosen.ratio = common_ratio(ratios)
        return chosen

    def _pairs(self, name: str, of: Callable[[Recording], Tensors]) -> dict[int, tuple[Tensor, Tensor]]:
        """Return what is expected and what is seen on each rank that has the tensor."""
        both = [(r, of(self._expected(r)[0]), of(r)) for r in self.mesh]
        return {r.rank: (own[name], seen[name]) for r, own, seen in both if name in own and name in seen}

    def _limit(self, name: str, of: Callable[[Recording], Tensors], least: float) -> float:
        """Return the largest deviation of a tensor that counts as rounding."""
        both = zip(map(of, self.one), map(of, self.reordered), strict=True)
        return limit_of(
            max(deviation(one[name], other.get(name, one[name]), least) for one, other in both if name in one)
        )

    def _expected(self, recording: Recording) -> tuple[Recording, Recording]:
        """Return the two recordings of the process that did the work of a rank's data rank."""
        return self.one[recording.data_rank], self.reordered[recording.data_rank]

    def _tensor(
        self, what: str, name: str, pairs: dict[int, tuple[Tensor, Tensor]], limit: float, least: float
    ) -> Finding:
        """Compare a tensor with what is expected on each rank; one that no rank has is missing on all."""
        differences = {rank: deviation(expected, seen, least) for rank, (expected, seen) in pairs.items()}
        differences = differences or {recording.rank: math.inf for recording in self.mesh}
        is_cut = any(seen.shape != expected.shape for expected, seen in pairs.values())
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


def _loss_of(steps: Sequence[RecordedStep], recordings: Sequence[Recording], number: int) -> float:
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


def repeated_samples(mesh: Sequence[Recording]) -> Finding | None:
    """Return two data ranks that train on the same samples, read outside of a prepared loader.

    A batch that is the same in every pass is meant: somebody looks whether a model learns it by heart.
    """
    first_of = {recording.data_rank: recording for recording in reversed(mesh)}
    if len(first_of) == 1 or any(recording.passes_without_loader == 0 for recording in first_of.values()):
        return None
    one, *others = (first_of[rank] for rank in sorted(first_of))
    own = _inputs(one)
    for other in others:
        theirs = _inputs(other)
        if len(set(own)) > 1 and own == theirs:
            return Finding(what="samples", module="", ranks=[one.rank, other.rank], cause=_REPEATED_SAMPLES)
    return None


def _inputs(recording: Recording) -> list[bytes]:
    """Return what the model was given in every forward pass."""
    calls = [call for step in recording.steps for call in step.calls if call.module == ""]
    return [b"".join(tensor.contiguous().numpy().tobytes() for tensor in call.inputs.values()) for call in calls]


_REPEATED_SAMPLES = (
    "The ranks train on the same samples: each reads them for itself, from the beginning. Hand the loader to "
    "prepare(), which gives every data rank its share."
)
_UNEQUAL_MASKS = (
    "Ranks that hold copies of one activation draw different masks for it, so that the copies are no longer equal. "
    "Give all ranks that share samples the same seed: set_seed(seed), without the rank."
)
_EQUAL_MASKS = (
    "Ranks with different samples draw the same masks. That is not wrong, and less random than on one process: "
    "set_seed(seed, device_specific=True) gives every rank its own."
)
