"""Estimate how fast published runs, and the same runs on other meshes, are: from shapes, by the planner's own timing.

The operations of one micro-batch come from `shapes`; what data parallelism, pipelines and the optimizer add is here.
Efficiency factors in `catalogue.yaml` were fitted with such lists, and traces of the script agree within a few percent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from meshwright.runtime.devices.catalogue import DeviceCluster
from meshwright.tools.plan.timing.collectives import collective_seconds
from meshwright.tools.plan.timing.depth import extrapolated
from meshwright.tools.plan.timing.pipelines import Stage, replay
from meshwright.tools.plan.timing.step import Timing, time_step
from meshwright.tools.plan.trace import BACKWARD, FORWARD, Collective, Trace

from .rows import block_parameters
from .script.options import Options
from .shapes import REDUCE, MicroBatch, micro_batch

_FEW, _MORE = 2, 3
_OPTIMIZER_BYTES = {"fused": 28, "foreach": 90}
"""That AdamW reads and writes for a parameter, in fp32."""
_CLIPPING_BYTES = 12
_KERNELS_OF_BLOCK = 27
"""Of an optimizer's step."""


@dataclass(frozen=True)
class Estimate:
    """One run on one cluster."""

    options: Options
    cluster: DeviceCluster
    compiled: bool = False
    balanced: bool = False
    """Whether blocks are divided over the stages of a pipeline by their work, the head's too; otherwise evenly."""

    @property
    def rate(self) -> float:
        """Return tokens per second and device."""
        options = self.options
        tokens = options.batch * options.seq * options.accumulation * options.dp_shard * options.dp_replicate
        return tokens / self.seconds / options.world_size

    @property
    def seconds(self) -> float:
        """Return how long a step takes."""
        return (self._passes() if self.options.pp == 1 else self._pipeline()) + self._update()

    def _passes(self) -> float:
        options = self.options
        whole = self._timing(options.layers, communicates=True).seconds
        if options.accumulation == 1 or options.sync_each or (options.reshard and options.dp_shard > 1):
            return options.accumulation * whole
        return whole + (options.accumulation - 1) * self._timing(options.layers, communicates=False).seconds

    def _pipeline(self) -> float:
        """Replay the schedule; what data parallelism adds comes once, at its end."""
        options, blocks = self.options, blocks_of_stages(self.options, balanced=self.balanced)
        head = self._timing(0, communicates=False).phases
        block = self._timing(1, communicates=False).phases
        stages = []
        for index, count in enumerate(blocks):
            passes = [
                count * (block[phase] - head[phase]) + (head[phase] if index == options.pp - 1 else 0.0)
                for phase in (FORWARD, BACKWARD)
            ]
            stages.append(Stage(*passes))
        stride = options.tp * options.cp * options.dp_shard * options.dp_replicate
        size = options.batch * options.seq // options.cp // options.tp * options.hidden * 2
        message = collective_seconds(Collective(0, "send", "pp", (0, stride), size, "", FORWARD, 0), self.cluster)
        schedule = options.schedule if options.accumulation >= options.pp else "gpipe"
        replayed = replay(schedule, stages, options.pp, options.accumulation, message)
        with_, without = (self._timing(options.layers / options.pp, communicates=it).seconds for it in (True, False))
        return replayed.seconds + max(0.0, with_ - without)

    def _update(self) -> float:
        """Return the time of the optimizer: what it reads and writes, and its kernels."""
        options, efficiency = self.options, self.cluster.device.efficiency
        found, layers = self._micro_batches[0], options.layers / options.pp
        size = _OPTIMIZER_BYTES[options.adam] + (_CLIPPING_BYTES if options.clip else 0)
        moved = (found.block * layers + found.rest) / options.dp_shard * size
        moving = moved / (self.cluster.device.bandwidth * efficiency.memory)
        return moving + layers * _KERNELS_OF_BLOCK * efficiency.kernel_us * 1e-6

    @cached_property
    def _micro_batches(self) -> tuple[MicroBatch, MicroBatch]:
        few, more = (micro_batch(self.options, layers, compiled=self.compiled) for layers in (_FEW, _MORE))
        return few, more

    def _timing(self, layers: float, *, communicates: bool) -> Timing:
        few, more = self._communicating if communicates else self._alone
        return extrapolated(few, more, (layers - _FEW) / (_MORE - _FEW))

    @cached_property
    def _communicating(self) -> list[Timing]:
        return [time_step(self._trace(found), self.cluster) for found in self._micro_batches]

    @cached_property
    def _alone(self) -> list[Timing]:
        return [time_step(found.trace, self.cluster) for found in self._micro_batches]

    def _trace(self, found: MicroBatch) -> Trace:
        """Return a micro-batch with the collectives of data parallelism."""
        added = [each for boundary in found.boundaries for each in self._collectives(*boundary)]
        return replace(found.trace, collectives=[*found.trace.collectives, *added])

    def _collectives(self, tick: int, where: str, elements: int) -> list[Collective]:
        options = self.options
        inner = options.tp * options.cp
        shards = tuple(range(0, inner * options.dp_shard, options.tp))
        copies = tuple(range(0, inner * options.dp_shard * options.dp_replicate, inner * options.dp_shard))
        if where != REDUCE:
            is_gathered = len(shards) > 1 and (options.reshard or where == FORWARD)
            gather = Collective(tick, "all_gather", "dp_shard", shards, 2 * elements, "", where, 0, "gather", tick + 1)
            return [gather] if is_gathered else []
        size = elements * (2 if options.precision == "mixed-bf16" else 4)
        found = []
        if len(shards) > 1:
            found.append(Collective(tick, "reduce_scatter", "dp_shard", shards, size, "", BACKWARD, 0, REDUCE))
        if len(copies) > 1:
            part = size // len(shards)
            found.append(Collective(tick, "all_reduce", "dp_replicate", copies, part, "", BACKWARD, 0, REDUCE))
        return found


def blocks_of_stages(options: Options, *, balanced: bool) -> list[int]:
    """Return the blocks of every stage of a pipeline: evenly, or so that the last has less by the work of the head."""
    block = block_parameters(options)
    head = options.hidden * options.vocab if balanced else 0
    share = (options.layers * block + head) / options.pp
    ends = [min(round(share * stage / block), options.layers) for stage in range(options.pp)] + [options.layers]
    return [end - start for start, end in pairwise(ends)]
