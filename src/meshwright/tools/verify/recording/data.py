"""What one process computed in its first steps, as plain data: `Recording`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass(kw_only=True)
class Call:
    """One call of a module in a forward pass, and the gradients that came back to it."""

    module: str
    """Its name in the user's model; the model itself is ""."""
    kind: str
    number: int
    """The forward pass of the step that the call belongs to, from 0."""
    inputs: Tensors = field(default_factory=dict)
    outputs: Tensors = field(default_factory=dict)
    input_gradients: Tensors = field(default_factory=dict)
    output_gradients: Tensors = field(default_factory=dict)
    positions: Tensor | None = None
    """The positions of each sequence that this process holds, where sequences are sharded."""


@dataclass(kw_only=True)
class RecordedStep:
    """One optimizer step."""

    losses: list[float] = field(default_factory=list)
    """The loss of every backward pass."""
    sums: list[bool] = field(default_factory=list)
    """For every loss, whether it is a sum over items and not a mean."""
    gradients: Tensors = field(default_factory=dict)
    """Full gradients after the last backward pass, before clipping."""
    norm: float | None = None
    """The norm that clipping returned."""
    clipped: Tensors = field(default_factory=dict)
    """Full gradients as the optimizer saw them."""
    rates: list[float] = field(default_factory=list)
    """The learning rate of each parameter group."""
    parameters: Tensors = field(default_factory=dict)
    """Full parameters after the step."""
    calls: list[Call] = field(default_factory=list)
    """Calls of modules, in the order in which they returned."""

    def of(self, data_rank: int, ranks: int) -> RecordedStep:
        """Return the part of one of several data ranks whose micro-batches were taken in turn."""
        return replace(
            self,
            losses=self.losses[data_rank::ranks],
            sums=self.sums[data_rank::ranks],
            calls=[
                replace(call, number=call.number // ranks) for call in self.calls if call.number % ranks == data_rank
            ],
        )


@dataclass(frozen=True, kw_only=True)
class Dropout:
    """A dropout that would have drawn random numbers: from which state of the generator, for which input."""

    module: str
    generator: int
    input: int


@dataclass(kw_only=True)
class Recording:
    """Everything that one process recorded."""

    rank: int
    sizes: dict[str, int]
    """Mesh axis -> number of processes."""
    coordinates: dict[str, int]
    """Mesh axis -> this process's position."""
    data_ranks: int
    data_rank: int
    initial: Tensors = field(default_factory=dict)
    """Full parameters and buffers after `prepare`."""
    ties: list[tuple[str, ...]] = field(default_factory=list)
    """Names of each parameter that has several."""
    dropouts: list[Dropout] = field(default_factory=list)
    """Those of the first forward pass."""
    steps: list[RecordedStep] = field(default_factory=list)
    passes_without_loader: int = 0
    """Backward passes outside of the loop over a prepared loader."""
    classes: dict[str, str] = field(default_factory=dict)
    """Module name -> class name."""

    def by_data_rank(self, ranks: int) -> list[Recording]:
        """Return the recording of each data rank; this one took their micro-batches in turn, and stepped once."""
        return [
            replace(self, data_rank=rank, steps=[step.of(rank, ranks) for step in self.steps]) for rank in range(ranks)
        ]

    def save(self, folder: Path) -> None:
        """Write the recording of this rank."""
        torch.save(self, folder / f"rank_{self.rank}.pt")


def read_recordings(folder: Path) -> list[Recording]:
    """Read what the ranks of a run recorded, in the order of their ranks."""
    files = sorted(folder.glob("rank_*.pt"), key=lambda file: int(file.stem.removeprefix("rank_")))
    return [torch.load(file, weights_only=False) for file in files]
