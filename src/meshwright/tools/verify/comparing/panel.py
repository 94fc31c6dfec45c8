"""Draw the result of a verification, between two rules and without a box, so that it can be copied and searched."""

from __future__ import annotations

import shutil
import textwrap
from typing import TYPE_CHECKING

from .findings import Finding

if TYPE_CHECKING:
    from .comparison import Comparison

_NAME_WIDTH = 11
WITHOUT_FIGURES = ("dropout", "samples", "calls")


def panel(result: Comparison, seconds: float | None = None) -> str:
    """Return the panel of a result."""
    width = min(100, max(60, shutil.get_terminal_size((100, 24)).columns))
    title = "── the mesh equals one process " if result.equal else "── the mesh does NOT equal one process "
    axes = " x ".join(f"{axis} {size}" for axis, size in result.sizes.items())
    lines = _field("mesh", f"{axes} ({result.processes} processes)", width)
    took = "" if seconds is None else f", in {seconds:.0f} s on the CPU"
    compared = f"{result.steps} step{'s' * (result.steps != 1)}, {result.values} values in fp32{took}"
    lines += _field("compared", compared, width)
    if result.largest:
        figures = ", ".join(f"{what} {difference:.1e}" for what, difference in result.largest.items())
        lines += _field("step 1", f"largest difference of {figures}", width)
    if result.first is not None:
        lines += _described(result.first, width)
    for note in result.notes:
        lines += _field("note", f"{place_of(note)}: {note.cause}", width)
    return "\n".join(["", title + "─" * (width - len(title)), *lines, "─" * width])


def _described(finding: Finding, width: int) -> list[str]:
    lines = _field("first", f"{place_of(finding)} (step {finding.step}, {_ranks(finding.ranks)})", width)
    if finding.what not in WITHOUT_FIGURES:
        ratio = "" if finding.ratio is None else f"; all have the factor {finding.ratio:.4g}"
        size = "it has another shape" if finding.difference == float("inf") else f"{finding.difference:.2g}, relative"
        lines += _field("differs by", f"{size}; rounding, measured, may cause {finding.rounding:.1g}{ratio}", width)
    return lines + _field("usually", finding.cause, width)


def place_of(finding: Finding) -> str:
    """Return where a finding is, in words."""
    module = f"{finding.module} ({finding.kind})" if finding.kind and finding.module else finding.module or "the model"
    if finding.between:
        return f"the code of {module}, before {finding.between}"
    names = {
        "initial value": f"the initial value of {finding.name}",
        "input": f"the input {finding.name} of {module}",
        "output": f"the output{finding.name} of {module}",
        "loss": "the loss",
        "gradient": "every gradient" if finding.module == "" and finding.ratio else f"the gradient of {finding.name}",
        "input gradient": f"the gradient that {module} passes on",
        "norm": "the norm of the gradients",
        "clipping": f"the gradient of {finding.name} between the backward pass and the step",
        "learning rate": "the learning rate",
        "parameter": f"the update of {finding.name}",
        "shape": f"the shape of {finding.name}",
        "dropout": f"the mask of {module}",
        "samples": "the samples, which are the same on several data ranks",
        "calls": finding.name,
    }
    return names[finding.what]


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _field(name: str, text: str, width: int) -> list[str]:
    indent = " " * (_NAME_WIDTH + 4)
    first = f"   {name:<{_NAME_WIDTH}} "
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=indent, break_long_words=False)
