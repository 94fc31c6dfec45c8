"""Estimate choices from the first trace. Estimates decide what is traced, and in which order; never what is reported.

`least_memory` is a bound: what needs more than a device has cannot fit, and is not traced. The others may be wrong by
tens of percent.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from ....runtime.devices.catalogue import DeviceCluster
from ..memory.lifetimes import block_of
from ..memory.peak import Memory
from ..timing.collectives import collective_seconds
from ..timing.roofline import LATENCY
from ..timing.step import Timing
from ..trace import (
    ACTIVATIONS,
    COMMUNICATION,
    COPIES,
    FORWARD,
    GRADIENTS,
    OPTIMIZER,
    TEMPORARIES,
    WEIGHTS,
    Collective,
    Trace,
)
from .choices import Choice, first_group

_COMPUTED_AGAIN = 4 / 3
_KEPT_BY_RECOMPUTE = 0.1
_HIDDEN = 0.7
"""Part of the computation behind which gathers and reductions of FSDP and DDP are hidden."""
_BYTES = {"float32": 4, "float64": 8}


@dataclass(frozen=True)
class Estimates:
    """What is known of the run as it is."""

    base: Choice
    trace: Trace
    memory: Memory
    timing: Timing
    cluster: DeviceCluster
    recompute_saves: float = 0.0
    """Bytes of activations."""

    def least_memory(self, choice: Choice) -> float:
        """Return bytes of a rank that no settings of this mesh and batch can do without."""
        owned = self.memory.most
        state = owned.get(WEIGHTS, 0.0) + owned.get(OPTIMIZER, 0.0)
        return state * self.base.parts / choice.parts + self._activations(choice) * (not choice.recompute)

    def expected_memory(self, choice: Choice) -> float:
        """Return about how many bytes the allocator of a rank holds: those of the run as it is, in proportion."""
        owned = self.memory.most
        kept = self._activations(choice)
        if choice.recompute and not self.base.recompute:
            saved = self.recompute_saves / max(1.0, owned.get(ACTIVATIONS, 0.0)) or 1 - _KEPT_BY_RECOMPUTE
            kept *= max(_KEPT_BY_RECOMPUTE, 1 - saved)
        work = self._share(choice) * owned.get(TEMPORARIES, 0.0)
        buffers = owned.get(COMMUNICATION, 0.0) + owned.get(COPIES, 0.0)
        if self.base.is_replicated:  # the buckets of DDP, as large as the gradients, and autocast's copies
            buffers *= choice.is_replicated
        found = self._state(choice) + kept + work + buffers
        if choice.shards > 1 and not choice.reshard:
            found += self._gathered(choice)
        return found * self.memory.reserved / max(1.0, self.memory.total)

    def _state(self, choice: Choice) -> float:
        owned = self.memory.most
        weights, gradients = owned.get(WEIGHTS, 0.0), owned.get(GRADIENTS, 0.0)
        if choice.accumulation > 1:  # the first pass leaves them
            gradients = max(gradients, weights * self.trace.trained_parameters / max(1, self.trace.parameters))
        return (weights + gradients + owned.get(OPTIMIZER, 0.0)) * self.base.parts / choice.parts

    def seconds(self, choice: Choice) -> float:
        """Return about how long a step takes."""
        computing = sum(self.timing.kinds.values()) * (_COMPUTED_AGAIN if choice.recompute else 1.0)
        passes = choice.accumulation * choice.microbatches
        latency = self.timing.bounds.get(LATENCY, 0.0) / (self.base.accumulation * self.base.microbatches) * passes
        hidden = self._sharding(choice) + self._replicas(choice)
        exposed = max(0.05 * hidden, hidden - _HIDDEN * computing)
        waiting = (choice.pp - 1) / choice.microbatches
        return (computing + latency + exposed + self._layers(choice) + self._sequences(choice)) * (1 + waiting)

    def _share(self, choice: Choice) -> float:
        """Return how much of the work of a pass a rank has, compared with the run as it is."""
        base = self.base
        samples = choice.samples_at_once / max(1, base.samples_at_once)
        return samples * (base.tp * base.cp * base.pp) / (choice.tp * choice.cp * choice.pp)

    def _activations(self, choice: Choice) -> float:
        return self._share(choice) * self.memory.most.get(ACTIVATIONS, 0.0)

    @cached_property
    def _element(self) -> int:
        """Return the bytes of an element of the computation."""
        flops = Counter[str]()
        for operation in self.trace.operations:
            flops[operation.dtype] += operation.flops
        return _BYTES.get(flops.most_common(1)[0][0], 2) if flops else 4

    def _gathered(self, choice: Choice) -> float:
        """Return the bytes of all parameters of a rank together."""
        return self.trace.parameters * self._element / (choice.tp * choice.pp)

    def _sharding(self, choice: Choice) -> float:
        if choice.shards == 1:
            return 0.0
        ranks = first_group(choice, "dp_shard", "cp")
        gathers = choice.accumulation * choice.microbatches * (2 if choice.reshard else 1)
        gathered = self._gathered(choice)
        return gathers * self._collective("all_gather", ranks, gathered) + self._collective(
            "reduce_scatter", ranks, self.trace.trained_parameters * 4 / (choice.tp * choice.pp)
        )

    def _replicas(self, choice: Choice) -> float:
        gradients = self.trace.trained_parameters * 4 / choice.parts
        return self._collective("all_reduce", first_group(choice, "dp_replicate"), gradients)

    def _layers(self, choice: Choice) -> float:
        """Return the time of tensor parallelism: two all-reduces of every block in each pass."""
        calls = (6 if choice.recompute else 4) * self._blocks(choice) * choice.accumulation * choice.microbatches
        return calls * self._collective("all_reduce", first_group(choice, "tp"), self._hidden_state(choice))

    def _sequences(self, choice: Choice) -> float:
        """Return the time of context parallelism: keys and values of every block are gathered in each pass."""
        calls = 3 * self._blocks(choice) * choice.accumulation * choice.microbatches
        state = self._hidden_state(choice) * choice.cp / choice.tp
        return calls * self._collective("all_gather", first_group(choice, "cp"), state)

    def _blocks(self, choice: Choice) -> float:
        return self.trace.all_blocks / choice.pp

    @cached_property
    def _width(self) -> int:
        """Return the usual inner dimension of products in blocks."""
        inner = Counter[int]()
        for operation in self.trace.operations:
            if operation.phase == FORWARD and len(operation.shape) == 3 and block_of(operation.module) is not None:
                inner[operation.shape[1]] += 1
        return inner.most_common(1)[0][0] if inner else 1024

    def _hidden_state(self, choice: Choice) -> float:
        """Return the bytes between two blocks in a pass."""
        step = self.trace.steps[-1]
        tokens = (step.tokens or step.samples) / max(1, step.samples) * choice.samples_at_once / choice.cp
        return tokens * self._width * self._element

    def _collective(self, name: str, ranks: tuple[int, ...], size: float) -> float:
        if len(ranks) < 2:
            return 0.0
        return collective_seconds(Collective(0, name, "", ranks, int(size), "", FORWARD, 0), self.cluster)
