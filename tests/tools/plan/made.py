"""Small traces made by hand: the blocks of a model, two steps, sizes that can be added up in the head."""

from __future__ import annotations

from meshwright.tools.plan.trace import (
    ACTIVATIONS,
    BACKWARD,
    COMMUNICATION,
    FORWARD,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    SETUP,
    TEMPORARIES,
    UPDATE,
    WEIGHTS,
    Allocation,
    Collective,
    Operation,
    Trace,
    TracedStep,
)

MIB = 1 << 20


class Maker:
    """Write a trace, one event per tick."""

    def __init__(self, **facts: object) -> None:
        defaults = {"rank": 0, "world_size": 1, "axes": {}, "parameters": 0, "trained_parameters": 0}
        self.trace = Trace(**{**defaults, "blocks": 0, "all_blocks": 0, **facts})  # type: ignore[arg-type]
        self.tick = 0
        self.phase = SETUP
        self.module = ""

    def at(self, phase: str, module: str = "") -> Maker:
        self.phase, self.module = phase, module
        return self

    def make(self, size: int, owner: str, stream: str = "main") -> Allocation:
        self.tick += 1
        allocation = Allocation(size, owner, self.tick, None, self.module, self.phase, stream)
        self.trace.allocations.append(allocation)
        return allocation

    def free(self, *allocations: Allocation) -> None:
        for allocation in allocations:
            self.tick += 1
            allocation.freed = self.tick

    def compute(self, name: str = "aten.mm", flops: int = 1000, dtype: str = "bfloat16") -> None:
        self.tick += 1
        step = len(self.trace.steps)
        self.trace.operations.append(Operation(self.tick, name, self.module, self.phase, step, flops, 100, dtype))

    def communicate(self, name: str, axis: str, ranks: int, size: int, stream: str = "main") -> Collective:
        self.tick += 1
        where = (self.module, self.phase, len(self.trace.steps), stream)
        self.trace.collectives.append(Collective(self.tick, name, axis, tuple(range(ranks)), size, *where))
        return self.trace.collectives[-1]


def model(blocks: int, *, step_count: int = 2, head: int = 4 * MIB, sharded: bool = False, **facts: object) -> Trace:
    """Return the trace of blocks with 8 MiB of weights, which keep 3 MiB inside and 1 MiB of output, and a head."""
    axes = {"dp_shard": 4} if sharded else {"dp_replicate": 4}
    made = Maker(**{"blocks": blocks, "all_blocks": blocks, "axes": axes, "world_size": 4, **facts})
    weights = [made.at(SETUP, f"layers.{block}").make(8 * MIB, WEIGHTS) for block in range(blocks)]
    moments: list[Allocation] = []
    for _ in range(step_count):
        began = made.tick + 1
        inside, outputs = [], []
        for block in range(blocks):
            made.at(FORWARD, f"layers.{block}")
            gathered = made.at(FORWARD, f"layers.{block}").make(16 * MIB, GATHERED) if sharded else None
            short = made.make(2 * MIB, ACTIVATIONS)
            inside.append(made.make(3 * MIB, TEMPORARIES))
            outputs.append(made.make(1 * MIB, ACTIVATIONS))
            made.compute()
            made.free(short, *([gathered] if gathered else []))
            if sharded:
                made.communicate("all_gather", "dp_shard", 4, 16 * MIB)
        logits = made.at(FORWARD, "head").make(head, ACTIVATIONS)
        made.at(BACKWARD, "head").compute()
        made.free(logits)
        gradients = []
        for block in reversed(range(blocks)):
            made.at(BACKWARD, f"layers.{block}").compute()
            gradients.append(made.make(8 * MIB, GRADIENTS))
            made.free(inside[block], outputs[block])
            if not sharded:
                bucket = made.make(8 * MIB, COMMUNICATION)
                made.communicate("all_reduce", "dp_replicate", 4, 8 * MIB)
                made.free(bucket)
        made.at(UPDATE)
        if not moments:
            moments = [made.make(16 * MIB, OPTIMIZER) for _ in weights]
        made.compute("aten._fused_adamw_", 0)
        made.free(*gradients)
        made.trace.steps.append(TracedStep(began, made.tick + 1, samples=8, tokens=8 * 16, passes=1))
        made.tick += 1
    return made.trace
