"""What usually causes a difference between a mesh and one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..recording.data import Recording

Rule = tuple[Callable[[Any, dict[str, int]], bool], str]


def cause_of(finding: Any, mesh: Sequence[Recording], one: Recording) -> str:
    """Return the usual cause of a finding: the first rule that fits."""
    untied = _untied(finding, mesh, one)
    if untied:
        return untied
    return next((text for fits, text in _RULES if fits(finding, mesh[0].sizes)), "")


def _untied(finding: Any, mesh: Sequence[Recording], one: Recording) -> str:
    """Name weights that are tied on one process and not on the mesh."""
    if finding.what not in ("gradient", "parameter", "clipping", "input gradient"):
        return ""
    tied_on_mesh = {names for recording in mesh for names in recording.ties}
    for names in one.ties:
        if names not in tied_on_mesh and "pp" not in mesh[0].sizes:
            return (
                f"{' and '.join(names)} are one parameter on one process, and two on the mesh: tie them again after "
                "the model is distributed."
            )
    return ""


_RULES: list[Rule] = [
    (
        lambda f, axes: f.what == "initial value",
        "The ranks did not begin with the same weights. Call set_seed(seed) before the model is made, without the "
        "rank in the seed, or load the same weights on every rank.",
    ),
    (
        lambda f, axes: f.what == "shape",
        "The tensor was cut once too often: by the script or the model's library, and by prepare().",
    ),
    (
        lambda f, axes: f.what == "input" and f.difference == float("inf"),
        "The batch was cut twice, or not at all: prepare() gives every data rank its share, and maybe_context_parallel "
        "cuts sequences. The script should do neither.",
    ),
    (
        lambda f, axes: f.what == "input",
        "The ranks read other samples than one process does. Hand the loader to prepare(), without a sampler of its "
        "own for each rank.",
    ),
    (
        lambda f, axes: f.what == "learning rate",
        "The script computes the rate from the number of processes, or steps a scheduler that was not given to "
        "prepare().",
    ),
    (
        lambda f, axes: f.what == "norm",
        "The norm is that of one rank's shards. accelerator.clip_grad_norm_ sums over all of them.",
    ),
    (
        lambda f, axes: f.what == "clipping",
        "Gradients were changed after the backward pass, by each rank for itself. Clip with "
        "accelerator.clip_grad_norm_, and nothing else.",
    ),
    (
        lambda f, axes: f.what == "parameter",
        "Gradients are right and the update is not: the optimizer holds other parameters, options or moments than on "
        "one process.",
    ),
    (
        lambda f, axes: f.what in ("gradient", "loss") and f.ratio is not None,
        "All have the same wrong factor: the loss is scaled by hand beside accelerator.backward, or gradients are "
        "divided by a number of processes or micro-batches that is not the one they are summed over.",
    ),
    (
        lambda f, axes: f.what == "output" and f.between != "" and bool({"cp", "sp"} & set(axes)),
        "Attention over sharded sequences: a mask, documents or a window that did not reach it, or positions that "
        "every rank counts from its own beginning. Give position_ids to maybe_context_parallel with the inputs.",
    ),
    (
        lambda f, axes: f.what == "loss" or (f.what == "output" and f.module == ""),
        "The model computes the same, and the loss does not: labels that are shifted after the cut, a mean over other "
        "numbers of items on each rank, or a term that is not linear in the samples, such as a router loss.",
    ),
    (
        lambda f, axes: f.what == "output" and "tp" in axes,
        "A split layer whose result is not summed over the ranks, whose bias is added or cut on every rank, or a "
        "module between two split layers that needs the whole activation. Check its entry in the plan.",
    ),
    (
        lambda f, axes: f.what == "output",
        "The module computes something else on a rank: a buffer that differs between ranks, code that depends on the "
        "rank, or statistics over its own samples.",
    ),
    (
        lambda f, axes: f.what == "input gradient" and "tp" in axes,
        "The backward pass of a split layer: the gradient of its input is not summed over the ranks.",
    ),
    (
        lambda f, axes: f.what == "input gradient",
        "The backward pass of this module differs, although its output does not: a custom autograd function, a hook, "
        "or a detached tensor.",
    ),
    (
        lambda f, axes: f.what == "gradient",
        "The gradient of this parameter is not averaged over the ranks: it is used outside of the prepared model, was "
        "replaced after prepare(), or is left out of the wrapper.",
    ),
]
