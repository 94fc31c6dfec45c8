"""Known reasons why numbers differ, each with its row in docs/differences.md and how to get the numbers of 1.x."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .records import ComparedStep


@dataclass(frozen=True)
class Difference:
    """The first thing that is not equal in two runs."""

    step: int
    """From 1 on; 0 before the first."""
    what: str
    rank: int
    theirs: str
    ours: str


@dataclass(frozen=True)
class Case:
    """What is known of a difference."""

    first: Difference
    theirs: ComparedStep
    ours: ComparedStep
    processes: int
    on_cpu: bool
    other_torch: bool
    differs_from_itself: bool


@dataclass(frozen=True)
class Cause:
    """Why numbers may differ."""

    applies: Callable[[Case], bool]
    why: str
    remedy: str
    row: str = ""
    """The first cell of its row in docs/differences.md."""


def _factor(case: Case) -> float:
    return case.ours.loss / case.theirs.loss if case.theirs.loss else 0.0


def _is_scaled(case: Case) -> bool:
    factor = _factor(case)
    return factor >= 256 and abs(math.log2(factor) - round(math.log2(factor))) < 0.01


KNOWN = (
    Cause(
        lambda case: case.differs_from_itself,
        "the script gives other numbers at every run, under the same package, too",
        "let it set its seeds, or compare with --seed 0",
    ),
    Cause(
        lambda case: case.other_torch,
        "the two interpreters have different versions of torch",
        "use the same torch in both environments",
    ),
    Cause(
        lambda case: case.first.what == "processes" and case.on_cpu,
        "1.x runs alone where ours forms a process group",
        "call Accelerator(cpu=True), or set ACCELERATE_USE_CPU=1 for 1.x",
        "`torchrun` on a machine without accelerators, without `cpu=True`",
    ),
    Cause(
        lambda case: case.first.what == "loss" and case.on_cpu and _is_scaled(case),
        "fp16 on a CPU has a loss scaler here, and 1.x computes in fp32 there",
        'use mixed_precision="no" on a CPU',
        '`mixed_precision="fp16"` on a CPU',
    ),
    Cause(
        lambda case: case.first.what == "backward passes",
        "the steps accumulate different numbers of batches. Ours reads gradient_accumulation_steps from the code, then "
        "from the variable, and each Accelerator keeps its own",
        "give the same number in the code and to every Accelerator",
        "`ACCELERATE_GRADIENT_ACCUMULATION_STEPS` and an argument in code",
    ),
    Cause(
        lambda case: case.first.what == "gradient norm" and len(case.theirs.losses) > 1 and case.processes > 1,
        "several losses went into the step: under DDP ours averages the gradients of each",
        "add the losses and call backward once",
        "two losses of one output under DDP, each with its `backward`",
    ),
    Cause(
        lambda case: case.first.what == "gradient norm" and len(case.theirs.losses) > 1,
        "several micro-batches went into the step: 1.x clips their partial sums, ours clips the gradient",
        "clip where accelerator.sync_gradients is true, as both then do the same",
        "`clip_grad_norm_` on an accumulating micro-batch",
    ),
    Cause(
        lambda case: case.first.what == "learning rate" and case.processes > 1,
        "a schedule with an end (OneCycleLR) runs past it under 1.x when the last round is padded",
        "give the schedule more steps than it can reach",
        "`OneCycleLR` (any schedule with `total_steps`) on N processes",
    ),
    Cause(
        lambda case: case.first.what == "samples" and case.first.step > 0,
        "the samples come in another order, or augmentation drew other random numbers: 1.x reads one batch ahead of "
        "the loop",
        "give random augmentation a generator of its own; for the order, remove order= from DataLoaderConfiguration",
        "a loader that is prepared: when its batches are read",
    ),
)


def causes_of(case: Case) -> list[Cause]:
    """Return the known causes that fit a difference."""
    return [cause for cause in KNOWN if cause.applies(case)]
