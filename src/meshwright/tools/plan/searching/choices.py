"""The ways to spread a run at the same global batch: `Choice`, and `Space`, which lists them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ....config.launch.options import yes_no
from ..trace import Trace, Traits

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""From the outermost, as in the mesh of a run."""
SIZE_OPTION = "parallelism_config_{}_size"
RESHARD, RECOMPUTE = "fsdp_reshard_after_forward", "fsdp_activation_checkpointing"
_LARGER, _SMALLER = 3, 4
"""How often the script's own batch size is doubled and halved."""
_MOST_MICROBATCHES = 64
"""Of a pipeline."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to spread a run."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    batch: int
    """Samples that a process's loader gives at once."""
    accumulation: int = 1
    microbatches: int = 1
    """Parts of a batch, in a pipeline."""
    reshard: bool = True
    """Whether gathered parameters are freed after the forward pass."""
    recompute: bool = False

    @property
    def axes(self) -> dict[str, int]:
        """Return the axes of more than one process."""
        return {axis: getattr(self, axis) for axis in AXES if getattr(self, axis) > 1}

    @property
    def copies(self) -> int:
        """Return the number of processes that see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def is_replicated(self) -> bool:
        """Return whether every process has the whole model: DDP, or one process."""
        return set(self.axes) <= {"dp_replicate"}

    @property
    def shards(self) -> int:
        """Return the number of processes over which FSDP divides parameters."""
        return self.dp_shard * self.cp

    @property
    def parts(self) -> int:
        """Return the number of processes that hold one copy of all state."""
        return self.shards * self.tp * self.pp

    @property
    def samples_at_once(self) -> int:
        """Return the samples of a forward pass."""
        return self.batch // self.microbatches

    def options(self, *, as_mesh: bool = False) -> dict[str, Any]:
        """Return the options of `meshwright launch`. `as_mesh`: the launch has sizes already, and all are said."""
        found: dict[str, Any] = {"gradient_accumulation_steps": self.accumulation}
        if self.is_replicated and not as_mesh:
            return found
        found["use_parallelism_config"] = True
        axes = {axis: getattr(self, axis) for axis in AXES} if as_mesh else self.axes
        found |= {SIZE_OPTION.format(axis): size for axis, size in axes.items()}
        if not self.is_replicated:
            found |= {"use_fsdp": True, "fsdp_version": "2"}
            found |= {RESHARD: str(self.reshard).lower(), RECOMPUTE: str(self.recompute).lower()}
        return found

    def labels(self) -> list[str]:
        """Return what distinguishes it besides its mesh and its batch."""
        return [
            *(["kept after forward"] if self.shards > 1 and not self.reshard else []),
            *(["recompute"] if self.recompute else []),
            *([f"{self.microbatches} micro-batches"] if self.pp > 1 else []),
        ]

    def saves_as_much_as(self, other: Choice) -> bool:
        """Return whether it has every setting that saves memory which the other one has."""
        return (self.reshard or not other.reshard) and (self.recompute or not other.recompute)


def choice_of(trace: Trace) -> Choice:
    """Return how a traced run is spread."""
    step, traits = trace.steps[-1], trace.traits
    passes = max(1, trace.all_passes or step.passes)
    in_stages = trace.axes.get("pp", 1) > 1
    return normal(
        Choice(
            dp_replicate=trace.axes.get("dp_replicate", 1),
            dp_shard=trace.axes.get("dp_shard", 1),
            cp=trace.axes.get("cp", 1),
            tp=trace.axes.get("tp", 1),
            pp=trace.axes.get("pp", 1),
            batch=step.samples if in_stages else step.samples // max(1, step.passes),
            accumulation=1 if in_stages else passes,
            microbatches=trace.all_microbatches if in_stages else 1,
            reshard=traits.reshards,
            recompute=traits.recomputes,
        )
    )


def normal(choice: Choice) -> Choice:
    """Return a choice without settings that have no effect."""
    if choice.is_replicated:
        return replace(choice, reshard=True, recompute=False)
    return choice if choice.shards > 1 else replace(choice, reshard=True)


@dataclass(frozen=True, kw_only=True)
class Space:
    """Everything that may be chosen."""

    world_size: int
    ranks_per_node: int
    base: Choice
    """How the script is spread as it is."""
    samples: int
    """Of a step, on all processes: they are kept."""
    blocks: int
    traits: Traits
    recomputes_itself: bool = False
    """Whether the model's own code recomputes."""
    sharded: bool = False
    """Whether the launch or the script uses FSDP, which excludes plain replicas."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Options that the user gave, which are kept."""

    def choices(self) -> list[Choice]:
        """List the choices."""
        found = (
            normal(replace(choice, reshard=reshard, recompute=recompute))
            for mesh in self._meshes()
            for choice in self._batches(mesh)
            for reshard in self._either(RESHARD, both=choice.shards > 1, otherwise=True)
            for recompute in self._either(RECOMPUTE, both=not self.recomputes_itself, otherwise=False)
        )
        return list(dict.fromkeys(found))

    def _either(self, option: str, *, both: bool, otherwise: bool) -> tuple[bool, ...]:
        if option in self.fixed:
            return (yes_no(self.fixed[option]),)
        return (False, True) if both else (otherwise,)

    def _meshes(self) -> Iterator[Choice]:
        for tp in self._sizes("tp", self.world_size):
            for cp in self._sizes("cp", self.world_size // tp):
                for pp in self._sizes("pp", self.world_size // tp // cp):
                    rest = self.world_size // (tp * cp * pp)
                    for shard in self._sizes("dp_shard", rest):
                        mesh = Choice(dp_replicate=rest // shard, dp_shard=shard, cp=cp, tp=tp, pp=pp, batch=1)
                        if self._allows(mesh):
                            yield mesh

    def _sizes(self, axis: str, most: int) -> list[int]:
        option = SIZE_OPTION.format(axis)
        allowed = [int(self.fixed[option])] if option in self.fixed else list(range(1, most + 1))
        return [size for size in allowed if most % size == 0 and (size == 1 or self._may(axis, size))]

    def _may(self, axis: str, size: int) -> bool:
        """Return whether the script and its model can use an axis."""
        traits = self.traits
        if axis == "tp":
            divides = all(heads % size == 0 for heads in traits.heads)
            return (traits.has_tp_plan or self.base.tp > 1) and divides and size <= self.ranks_per_node
        if axis == "cp":
            return traits.splits_sequences or self.base.cp > 1
        if axis == "pp":
            return (traits.forwards_backwards or self.base.pp > 1) and size <= max(self.blocks, self.base.pp)
        return True

    def _allows(self, mesh: Choice) -> bool:
        option = SIZE_OPTION.format("dp_replicate")
        if option in self.fixed and int(self.fixed[option]) not in (mesh.dp_replicate, -1):
            return False
        return self.samples % mesh.copies == 0 and not (mesh.is_replicated and self.sharded and self.world_size > 1)

    def _batches(self, mesh: Choice) -> Iterator[Choice]:
        """Yield the mesh with every batch size that keeps the global batch."""
        samples = self.samples // mesh.copies
        if mesh.pp > 1:
            wanted = {self.base.microbatches, mesh.pp, 2 * mesh.pp, 4 * mesh.pp, 8 * mesh.pp}
            for parts in sorted(wanted):
                if mesh.pp <= parts <= max(_MOST_MICROBATCHES, mesh.pp) and samples % parts == 0:
                    yield replace(mesh, batch=samples, microbatches=parts)
        elif self.traits.accumulates:
            sizes = [self.base.batch << power for power in range(_LARGER + 1)]
            sizes += [self.base.batch >> power for power in range(1, _SMALLER + 1)]
            for batch in sizes:
                if batch and samples % batch == 0:
                    yield replace(mesh, batch=batch, accumulation=samples // batch)
        elif samples % self.base.accumulation == 0:
            yield replace(mesh, batch=samples // self.base.accumulation, accumulation=self.base.accumulation)


def first_group(choice: Choice, *axes: str) -> tuple[int, ...]:
    """Return the ranks of the group of rank 0 along neighbouring axes."""
    inner = prod(getattr(choice, axis) for axis in AXES[AXES.index(axes[-1]) + 1 :])
    return tuple(range(0, inner * prod(getattr(choice, axis) for axis in axes), inner))
