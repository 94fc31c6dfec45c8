"""What one rank of a planned run does, as plain data: `Trace`.

A trace is made without devices, on fake tensors. Every event has a tick, a position in the order in which the rank
issued its work, so that memory, communication and time can be read from the same record.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
ACTIVATIONS, COPIES, GATHERED = "activations", "copies", "gathered"
COMMUNICATION, TEMPORARIES = "communication", "temporaries"
OWNERS = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, COPIES, GATHERED, COMMUNICATION, TEMPORARIES)
"""What memory is used for. `copies` are weights that autocast has cast and the backward pass needs, `gathered`
parameters that a sharded module has together for a moment, `communication` buffers that collectives send from and
receive into."""

SETUP, FORWARD, BACKWARD, UPDATE = "setup", "forward", "backward", "update"
"""Phases: before the first step, the two passes, and everything from the end of the last backward pass to the end of
the optimizer step (clipping too)."""

MAIN_STREAM = "main"
"""The stream of computation. Collectives that a strategy overlaps have streams of their own, as on a GPU."""


@dataclass(slots=True)
class Allocation:
    """One piece of memory, from its first use to its last."""

    size: int
    """Bytes that were requested, before an allocator rounds them."""
    owner: str
    born: int
    freed: int | None
    """The ticks between which it existed; None if it still did at the end."""
    module: str
    """The module that was running, by its name in the user's model."""
    phase: str
    stream: str = MAIN_STREAM


@dataclass(slots=True)
class Operation:
    """One kernel."""

    tick: int
    name: str
    """As torch registers it, such as `aten.mm`."""
    module: str
    phase: str
    step: int
    flops: int
    read_and_written: int
    """Bytes of inputs and outputs."""
    dtype: str
    """Of the computation, such as `bfloat16`."""
    shape: tuple[int, ...] = ()
    """For products of matrices: rows, inner dimension, columns."""
    causal: bool = False
    """Whether it is attention that skips the upper half of the scores; `flops` counts them in full."""
    compiled: bool = False
    """Whether it is part of a compiled graph, where the compiler fuses elementwise operations."""
    recomputed: bool = False
    """Whether it repeats work of the forward pass, by activation checkpointing."""


@dataclass(slots=True)
class Collective:
    """One collective, or one message between two ranks."""

    tick: int
    name: str
    """all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, send, recv, …"""
    axis: str
    """Axes of the mesh that the group spans, such as `tp` or `dp_replicate x dp_shard`."""
    ranks: tuple[int, ...]
    """Global ranks of the group."""
    size: int
    """Bytes of the whole: what a rank has after a gather, and before a reduce-scatter."""
    module: str
    phase: str
    step: int
    stream: str = MAIN_STREAM
    needed: int | None = None
    """The tick at which computation waits for it; None if nothing does before the end of the step."""


@dataclass(slots=True)
class TracedStep:
    """The boundaries of one optimizer step."""

    began: int
    ended: int
    samples: int
    """Samples that this rank's loader gave in the step."""
    tokens: int
    """Tokens of them, counted as elements of the largest integer tensor of each batch; 0 if there is none."""
    passes: int
    """Backward passes, which are micro-batches of accumulation."""


@dataclass
class Traits:
    """What the script does and sets in its code, which decides what can be changed from outside."""

    accumulates: bool = False
    """It calls `accumulate`, and below: `maybe_context_parallel`, and `forward_backward`."""
    splits_sequences: bool = False
    forwards_backwards: bool = False
    has_tp_plan: bool = False
    heads: tuple[int, ...] = ()
    """Numbers that a split of layers has to divide, where the model names them."""
    in_code: tuple[str, ...] = ()
    """Arguments of Accelerator that the script gives, among those that a launch can give too."""
    reshards: bool = True
    recomputes: bool = False
    offloads: bool = False


@dataclass
class Trace:
    """Everything that is known of one rank."""

    rank: int
    world_size: int
    axes: dict[str, int]
    """Mesh axis -> number of ranks, for axes of more than one."""
    parameters: int
    """Elements of the whole model, of all ranks together."""
    trained_parameters: int
    blocks: int
    """Repeated blocks that were traced, of all stages together."""
    all_blocks: int
    """Repeated blocks that the model has."""
    stage: int = 0
    stages: int = 1
    schedule: str = ""
    """Name of the pipeline's schedule, and below how many micro-batches were traced and how many a step has."""
    microbatches: int = 1
    all_microbatches: int = 1
    all_passes: int = 0
    """Backward passes of a step, if fewer of them were traced; 0 if all were."""
    traits: Traits = field(default_factory=Traits)
    steps: list[TracedStep] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    guesses: list[str] = field(default_factory=list)
    """Places of the script, as `file:line what`, that read a number of a tensor and got a substitute."""

    @property
    def untraced_passes(self) -> int:
        """Return how many passes of the last step were not traced. They do what its first pass does."""
        return max(0, self.all_passes - self.steps[-1].passes) if self.steps else 0

    @property
    def batches_of_step(self) -> tuple[int, int]:
        """Return samples and tokens that this rank's loader gives in a step, those of untraced passes too."""
        step = self.steps[-1]
        passes = step.passes + self.untraced_passes
        return step.samples * passes // max(1, step.passes), step.tokens * passes // max(1, step.passes)

    def save(self, path: Path) -> None:
        """Write the trace."""
        path.write_bytes(pickle.dumps(self, protocol=5))


def read_trace(path: Path) -> Trace:
    """Read a trace that a process of this planner wrote."""
    trace: Trace = pickle.loads(path.read_bytes())
    return trace
