"""Tell the memory of a model for inference and for training with Adam: `estimate`.

Weights are counted, in any format. Everything else is read from a trace of rank 0, as `meshwright plan` does.

[Note: formats] Parameters are stored in one format and computed in another one. `float32` does both in fp32. In mixed
precision the parameters, their gradients and Adam's two moments stay in fp32, and autocast makes a 16-bit copy of the
weights that lives as long as the graph. `pure` means that nothing is kept in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from ...inference.estimating.batches import Loss, ModelArguments
from ...inference.estimating.sizes import FLOATS, Sizes
from ..plan.memory.peak import Memory
from ..plan.trace import ACTIVATIONS, COMMUNICATION, COPIES, GATHERED, GRADIENTS, OPTIMIZER, TEMPORARIES, WEIGHTS
from .levers import LEVERS, Suggestion
from .program import NotTracedError, Program

_MIXED_PRECISION = {"float32": "no", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True, kw_only=True)
class ProcessLayout:
    """The distribution of a model over processes: a copy on each, or with `fsdp` a shard of every parameter."""

    processes: int = 1
    fsdp: bool = False
    reshard_after_forward: bool = True

    @property
    def sharded(self) -> bool:
        """Return whether a process has only a part."""
        return self.fsdp and self.processes > 1


@dataclass(frozen=True, kw_only=True)
class InferenceMemory:
    """Bytes of one process for inference, at the peak."""

    weights: int
    gathered: int
    """The parameters of a sharded model that are gathered at that time."""
    forward: int | None
    """The batch, outputs and everything in between; None if not traced."""

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.gathered + (self.forward or 0)


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Bytes of one process for training, at the peak of a step."""

    stored_in: str
    computed_in: str
    weights: int
    gradients: int
    optimizer: int
    """Adam: two moments and a step tensor per parameter."""
    activations: int | None
    """Tensors kept for the backward pass, the batch, and the outputs, which a loop holds; None if not traced."""
    copies: int | None
    """Weights that autocast has cast; None if not traced."""
    communication: int
    """Buckets of DDP, or gathered parameters and buffers of FSDP."""
    temporaries: int
    """What an operation needs for a moment: gradients of activations, and lists of the optimizer."""
    peak_in: str
    """The phase of the peak: `forward`, `backward`, or `update`, which is the optimizer step."""
    most_activations: int | None
    """The most that activations take at any time; None if not traced."""

    @property
    def total(self) -> int:
        """The sum of all parts, which is the peak."""
        state = self.weights + self.gradients + self.optimizer
        return state + (self.activations or 0) + (self.copies or 0) + self.communication + self.temporaries


@dataclass(frozen=True, kw_only=True)
class WithLever:
    """The memory of training with one lever."""

    name: str
    line: str
    """How it is written in a script."""
    training: TrainingMemory | None
    saves: int = 0
    """Bytes of the peak."""
    objection: str | None = None
    """Why it is not possible, or could not be traced."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """The memory of a model in one format."""

    dtype: str
    largest_layer: int
    largest_layer_name: str
    inference: InferenceMemory
    training: TrainingMemory | None
    """None for formats that are for inference only, and for models without trained parameters."""
    levers: tuple[WithLever, ...] = ()
    """The same training with less memory, if it was requested."""
    left_out: str | None = None
    """Why the memory of a batch is not known."""
    guesses: tuple[str, ...] = ()
    """Places that read a number of a tensor, as `file:line what`; they got a substitute."""


def estimate(
    model: nn.Module,
    dtype: str,
    *,
    batch: ModelArguments | None = None,
    loss: Loss | None = None,
    spread: ProcessLayout = ProcessLayout(),
    pure: bool = False,
    levers: bool = False,
) -> MemoryEstimate:
    """Return the memory of a model in a format, with a batch per process; without one, activations are left out.

    The model may be on the meta device. Nothing is allocated, and the model is left as it is. `loss` takes the outputs
    of the model and the batch. With `levers` the training is traced again with each line that saves memory.
    """
    sizes = Sizes(model, dtype)
    name, largest = sizes.largest_layer()
    quantized = dtype not in FLOATS
    computed_in = FLOATS.get(dtype, torch.float16)
    program = Program(
        model=model,
        batch=batch,
        stored_in=computed_in,
        training=False,
        processes=spread.processes if spread.sharded and not quantized else 1,
        fsdp=spread.sharded and not quantized,
        reshard_after_forward=spread.reshard_after_forward,
    )
    problems = [] if batch is not None else ["no batch was given"]
    guesses: list[str] = []
    inference = _inference(program, sizes.total(), problems, guesses)
    training = None
    if not quantized and any(param.requires_grad for param in model.parameters()):
        program = replace(program, training=True, loss=loss, processes=spread.processes)
        if not pure:
            program = replace(program, stored_in=torch.float32, mixed_precision=_MIXED_PRECISION[dtype])
        training = _training(program, dtype, problems, guesses)
    possible = levers and training is not None and not problems
    return MemoryEstimate(
        dtype=dtype,
        largest_layer=largest,
        largest_layer_name=name,
        inference=inference,
        training=training,
        levers=tuple(_with_lever(program, dtype, lever, training) for lever in LEVERS) if possible and training else (),
        left_out=problems[0] if problems else None,
        guesses=tuple(dict.fromkeys(guesses)),
    )


def _inference(program: Program, weights: int, problems: list[str], guesses: list[str]) -> InferenceMemory:
    if not program.fsdp and program.batch is None:
        return InferenceMemory(weights=weights, gathered=0, forward=None)
    memory = _memory(program, problems, guesses)
    parts = _parts(memory)
    gathered = parts[GATHERED] + parts[COMMUNICATION] if program.fsdp else 0
    forward = None if problems else parts[ACTIVATIONS] + parts[COPIES] + parts[TEMPORARIES]
    return InferenceMemory(weights=parts[WEIGHTS] if program.fsdp else weights, gathered=gathered, forward=forward)


def _training(program: Program, dtype: str, problems: list[str], guesses: list[str]) -> TrainingMemory:
    memory = _memory(program, problems, guesses)
    return _training_of(memory, program, dtype, has_batch=not problems)


def _training_of(memory: Memory, program: Program, dtype: str, *, has_batch: bool) -> TrainingMemory:
    parts = _parts(memory)
    return TrainingMemory(
        stored_in=str(program.stored_in).removeprefix("torch."),
        computed_in=dtype,
        weights=parts[WEIGHTS],
        gradients=parts[GRADIENTS],
        optimizer=parts[OPTIMIZER],
        activations=parts[ACTIVATIONS] if has_batch else None,
        copies=parts[COPIES] if has_batch else None,
        communication=parts[GATHERED] + parts[COMMUNICATION],
        temporaries=parts[TEMPORARIES],
        peak_in=memory.peak.moment.phase,
        most_activations=round(memory.most[ACTIVATIONS]) if has_batch else None,
    )


def _with_lever(program: Program, dtype: str, lever: Suggestion, without: TrainingMemory) -> WithLever:
    objection = lever.objection(program)
    if objection is None:
        try:
            memory, _ = replace(program, lever=lever.name).memory()
        except NotTracedError as error:
            objection = str(error)
        else:
            training = _training_of(memory, program, dtype, has_batch=True)
            saves = without.total - training.total
            return WithLever(name=lever.name, line=lever.line, training=training, saves=saves)
    return WithLever(name=lever.name, line=lever.line, training=None, objection=objection)


def _memory(program: Program, problems: list[str], guesses: list[str]) -> Memory:
    """Trace the program; without a batch, if the model does not run with it."""
    if not problems:
        try:
            memory, trace = program.memory()
        except NotTracedError as error:
            problems.append(f"the model did not run on fake tensors ({error})")
        else:
            guesses += trace.guesses
            return memory
    return replace(program, batch=None, loss=None).memory()[0]


def _parts(memory: Memory) -> Mapping[str, int]:
    return {owner: round(size) for owner, size in memory.peak.bytes.items()}
