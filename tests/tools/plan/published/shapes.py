"""List what one rank does in one micro-batch of a published run, from the shapes of its model.

The script's own decoder runs on meta tensors, with layers as small as tensor parallelism makes them. That takes a
second, and a trace of the script tens of seconds, so hundreds of meshes can be compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.tools.plan.trace import BACKWARD, FORWARD, MAIN_STREAM, Collective, Trace, TracedStep
from meshwright.tools.plan.tracing.host.values import Values
from meshwright.tools.plan.tracing.recorder import TraceRecorder

from .script.options import Options

SCRIPT = Path(__file__).parent / "script"


def import_script(main: str = "decoder") -> tuple[ModuleType, ModuleType]:
    """Import a module of the script as the script does, and its options."""
    sys.path.insert(0, str(SCRIPT))
    try:
        return import_module(main), import_module("options")
    finally:
        sys.path.remove(str(SCRIPT))


@dataclass
class MicroBatch:
    """Operations of a forward and a backward pass, and where data parallelism communicates between them."""

    trace: Trace
    boundaries: list[tuple[int, str, int]] = field(default_factory=list)
    """Ticks at which parameters are gathered or gradients reduced, in which of FORWARD, BACKWARD and REDUCE, and how
    many elements of this rank's part of the model."""
    block: int = 0
    """Elements of a block, and below of the rest of the model."""
    rest: int = 0


REDUCE = "reduce"


def micro_batch(options: Options, layers: int, *, compiled: bool) -> MicroBatch:
    """Return one micro-batch of a model with so many layers."""
    return _micro_batch(
        replace(
            options,
            layers=layers,
            dp_shard=1,
            dp_replicate=1,
            pp=1,
            accumulation=1,
            reshard=True,
            sync_each=False,
            keep_gradients=False,
            clip=True,
            schedule="",
            precision="",
            adam="",
        ),
        compiled,
    )


@cache
def _micro_batch(options: Options, compiled: bool) -> MicroBatch:
    decoder, _ = import_script()
    train, _ = import_script("train")
    options = replace(options, seq=options.seq // options.cp)
    found = MicroBatch(Trace(0, 1, {}, 0, 0, options.layers, options.layers))
    recorder = TraceRecorder(found.trace, Values([]), lambda ranks: "")
    walk = _Walk(found, recorder, tuple(range(options.tp)))
    with torch.device("meta"), patch.object(F, "scaled_dot_product_attention", _attention):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = decoder.Decoder(options)
            if options.tp > 1:
                walk.split(model, options)
        finally:
            torch.set_default_dtype(torch.float32)
        found.block = sum(param.numel() for param in model.blocks[0].parameters())
        found.rest = sum(param.numel() for param in model.parameters()) - options.layers * found.block
        walk.wrap(model, lambda: decoder.recompute(model.blocks, options), is_recomputed=options.recompute != "none")
        tokens = torch.zeros(options.batch, options.seq, dtype=torch.long)
        recorder.phase = FORWARD
        with recorder:
            walk.note(FORWARD, found.rest)
            train.Loss(options, None)(model(tokens, tokens), tokens).backward()
            walk.note(REDUCE, found.rest)
    found.trace.steps = [TracedStep(0, recorder.tick + 2, 0, 0, 1)]
    found.trace.allocations = []
    for operation in found.trace.operations:
        operation.compiled = compiled
        if "attention" in operation.name:  # keys and values come from all ranks of the sequence
            operation.flops *= options.cp
    return found


def _attention(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, enable_gqa: bool) -> Tensor:
    if enable_gqa:
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    attended: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, False)[0]
    return attended


class _Walk:
    """Notes of a model that runs."""

    def __init__(self, found: MicroBatch, recorder: TraceRecorder, split_over: tuple[int, ...]) -> None:
        self.found, self.recorder, self.split_over = found, recorder, split_over
        self.depth = 0
        recorder.module = lambda: ("", self.depth > 0)

    def note(self, where: str, elements: int) -> None:
        """Note that data parallelism communicates here."""
        self.found.boundaries.append((self.recorder.tick, where, elements))

    def communicate(self, name: str, whole: Tensor) -> None:
        """Add a collective of split layers, for which computation waits."""
        phase = BACKWARD if torch._C._current_autograd_node() is not None else FORWARD
        tick, size = self.recorder.tick, whole.numel() * whole.element_size()
        self.found.trace.collectives.append(
            Collective(tick, name, "tp", self.split_over, size, "", phase, 0, MAIN_STREAM, tick)
        )

    def wrap(self, model: nn.Module, recompute: Callable[[], None], *, is_recomputed: bool) -> None:
        """Note the boundaries of blocks, and what is computed in them again."""
        blocks: Any = model.blocks
        for block in blocks:
            block.forward = self._inside(block.forward)
        if is_recomputed:
            recompute()
        for block in blocks:
            block.forward = self._bounded(block.forward)

    def _inside(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any) -> Tensor:
            self.depth += 1
            try:
                return forward(*args)
            finally:
                self.depth -= 1

        return run

    def _bounded(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(hidden: Tensor, *args: Any) -> Tensor:
            self.note(FORWARD, self.found.block)
            hidden = _Boundary.apply(hidden, lambda: self.note(REDUCE, self.found.block))
            result: Tensor = _Boundary.apply(forward(hidden, *args), lambda: self.note(BACKWARD, self.found.block))
            return result

        return run

    def split(self, model: Any, options: Options) -> None:
        """Make the layers of a block as small as on one rank, and gather and scatter what is between them."""
        tp, hidden = options.tp, options.hidden
        keys = max(options.kv_heads // tp, 1) * hidden // options.heads

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        for block in model.blocks:
            block.attention.query, block.attention.out = linear(hidden, hidden // tp), linear(hidden // tp, hidden)
            block.attention.key, block.attention.value = linear(hidden, keys), linear(hidden, keys)
            block.mlp.gate, block.mlp.up = (linear(hidden, options.ffn // tp) for _ in range(2))
            block.mlp.down = linear(options.ffn // tp, hidden)
            for part in (block.attention, block.mlp):
                part.forward = self._split(part.forward)
        model.head = linear(hidden, options.vocab // tp)
        embed, norm = model.embedding.forward, model.norm.forward
        model.embedding.forward = lambda tokens: _Scatter.apply(embed(tokens), self)
        model.norm.forward = lambda x: _Gather.apply(norm(x), self)

    def _split(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(part: Tensor, *args: Any) -> Tensor:
            result: Tensor = _Scatter.apply(forward(_Gather.apply(part, self), *args), self)
            return result

        return run


class _Boundary(torch.autograd.Function):
    """Call a function when the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, then: Callable[[], None]) -> Tensor:
        ctx.then = then
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.then()
        return grads[0], None


class _Gather(torch.autograd.Function):
    """Gather a sequence that is split over ranks; its gradient is reduced and scattered."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, walk: _Walk) -> Tensor:
        ctx.walk = walk
        return _gathered(part, walk)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _scattered(grads[0], ctx.walk), None


class _Scatter(torch.autograd.Function):
    """The other way round."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, walk: _Walk) -> Tensor:
        ctx.walk = walk
        return _scattered(whole, walk)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gathered(grads[0], ctx.walk), None


def _gathered(part: Tensor, walk: _Walk) -> Tensor:
    whole = part.new_empty(part.shape[0], part.shape[1] * len(walk.split_over), *part.shape[2:])
    walk.communicate("all_gather", whole)
    return whole


def _scattered(whole: Tensor, walk: _Walk) -> Tensor:
    walk.communicate("reduce_scatter", whole)
    return whole.new_empty(whole.shape[0], whole.shape[1] // len(walk.split_over), *whole.shape[2:])
