"""Partition a model into pipeline stages: where it is cut, and which stage owns which module.

[Note: cutting] A model is cut at module names, and every stage runs the model's *own* forward pass. Modules of other
stages are placeholders that only know shapes (`tracing.py`). What the previous stage sends replaces the arguments of
the stage's first block, and the pass ends where the next stage starts (`stages.py`). torch's tracer
(`torch.distributed.pipelining.pipeline`) was tried first and rejected. It cuts a recorded graph, which fixes the
example's sequence length and training mode: dropout silently stays on in evaluation. It also needs an example before
the optimizer is bound, does not support `if` on values, and keeps none of the modules that FSDP2, tensor parallelism,
activation checkpointing and regional compilation work on. Unlike the tracer, this does not support a value that
bypasses a cut, from one stage to a later one, other than as an argument of the stage's first block. That is detected
and reported with the first batch, on every process, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..modules.wrapping import repeated_blocks

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that are never called: their children are assigned to stages one by one."""


class CannotCutError(ValueError):
    """Report that a model cannot be cut, with the reason and a remedy.

    The model has no blocks to divide, fewer of them than stages, or parameters that two stages need. Name the cuts with
    `PipelineConfig(split_at=...)`, give `example_inputs`, or take fewer stages.
    """


@dataclass
class Partition:
    """Which stage owns which part of a model."""

    starts: list[str]
    """The first modules of the stages after the first one."""
    parts: dict[str, int | None] = field(default_factory=dict)
    """Modules that belong to one stage; None for those without parameters, which every stage has."""
    loose_parameters: dict[str, int] = field(default_factory=dict)
    """Parameters held directly by a module that is cut."""
    cut_modules: list[str] = field(default_factory=list)
    """The modules that are cut, from the outside in."""

    @property
    def num_stages(self) -> int:
        """Return the number of stages."""
        return len(self.starts) + 1

    def part_of(self, tensor: str) -> str | None:
        """Return the part that holds a parameter or buffer."""
        name = tensor
        while name:
            name = name.rpartition(".")[0]
            if name in self.parts:
                return name
        return None

    def stage_of(self, tensor: str) -> int | None:
        """Return the stage that owns a parameter or buffer; None if every stage has it."""
        part = self.part_of(tensor)
        return self.loose_parameters.get(tensor) if part is None else self.parts[part]


def stage_starts(
    model: nn.Module, split_at: Sequence[str] | None, num_stages: int, asked: str, blocks: Sequence[str] = ()
) -> list[str]:
    """Return the names of the first modules of the stages after the first one.

    `asked` names the setting in error messages; `blocks` are the classes of the blocks, if they are known.
    """
    if split_at is None:
        return _even_starts(model, num_stages, asked, blocks)
    _require_modules(model, split_at)
    if len(split_at) != num_stages - 1:
        raise CannotCutError(
            f"PipelineConfig(split_at={list(split_at)}) begins {len(split_at)} new stages, which makes "
            f"{len(split_at) + 1}, and {asked} has {num_stages}: name {num_stages - 1} modules."
        )
    nested = [(a, b) for a in split_at for b in split_at if b.startswith(a + ".")]
    if nested or len(set(split_at)) != len(split_at):
        raise CannotCutError(
            f"PipelineConfig(split_at={list(split_at)}): a stage cannot begin twice, nor with a module inside "
            "another one that begins a stage."
        )
    return list(split_at)


def _require_modules(model: nn.Module, split_at: Sequence[str]) -> None:
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    unknown = [name for name in split_at if name not in names]
    if unknown:
        endings = {name.rpartition(".")[2] for name in unknown}
        similar = [name for name in names if name.rpartition(".")[2] in endings]
        raise CannotCutError(
            f"PipelineConfig(split_at={list(split_at)}): the model has no module {', '.join(unknown)}. It has "
            f"{', '.join((similar or names)[:8])}."
        )


def _even_starts(model: nn.Module, num_stages: int, asked: str, classes: Sequence[str]) -> list[str]:
    blocks = blocks_of(model, classes)
    if not blocks:
        raise CannotCutError(
            f"{type(model).__name__} has no list of blocks, so it is not known where to cut it into {num_stages} "
            "stages. Name the modules with which new stages begin: PipelineConfig(split_at=[...]). An nn.Sequential "
            "can always be cut."
        )
    if len(blocks) < num_stages:
        raise CannotCutError(
            f"{asked} has {num_stages} stages, and the model only {len(blocks)} blocks ({blocks[0]} to {blocks[-1]}): "
            f"at most {len(blocks)} stages would work."
        )
    bounds = [round(stage * len(blocks) / num_stages) for stage in range(1, num_stages)]
    return [blocks[bound] for bound in bounds]


def blocks_of(model: nn.Module, named: Sequence[str] = ()) -> list[str]:
    """Return the names of the model's blocks: those in the list that holds most of its parameters."""
    named = named or getattr(model, "_no_split_modules", None) or ()
    classes = repeated_blocks(model)

    def is_block(module: nn.Module) -> bool:
        return type(module).__name__ in named or type(module) in classes

    most, best = 0, list[str]()
    for owner, container in model.named_modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            blocks = _blocks_in(container, is_block)
            size = sum(_size(block) for block in blocks.values())
            if size > most and len(blocks) > 1:
                most, best = size, [_join(owner, name) for name in blocks]
    return best


def _blocks_in(container: nn.Module, is_block: Callable[[nn.Module], bool]) -> dict[str, nn.Module]:
    """Return the children that may start a stage; in a sequence of plain layers, all with parameters."""
    children = dict(container.named_children())
    blocks = {name: child for name, child in children.items() if is_block(child)}
    return blocks or {name: child for name, child in children.items() if any(True for _ in child.parameters())}


def _size(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def partition_model(
    model: nn.Module, starts: list[str], uses: Mapping[str, set[int]] | None = None, *, check_ties: bool = True
) -> Partition:
    """Assign every part of a model to a stage.

    The parts are the modules that are not cut. `uses` maps every parameter to the stages whose forward pass uses it.
    Without it, modules registered before the first block go to the first stage and modules registered after the last
    block to the last stage, which fits most models.
    """
    partition = Partition(starts)
    inner = {start.rpartition(".")[0] for start in starts}
    inner |= {name[:i] for name in inner for i, letter in enumerate(name) if letter == "."} | {""}
    stage = 0

    def walk(module: nn.Module, name: str) -> None:
        nonlocal stage
        partition.cut_modules.append(name)
        for own, param in module._parameters.items():
            if param is not None:
                partition.loose_parameters[_join(name, own)] = stage if isinstance(module, _LISTS) else 0
        for own, child in module._modules.items():
            full = _join(name, own)
            if child is None:
                continue
            if full in starts:
                stage = starts.index(full) + 1
            if full not in starts and (full in inner or isinstance(child, _LISTS)):
                walk(child, full)
            else:
                partition.parts[full] = stage if any(True for _ in child.parameters()) else None

    walk(model, "")
    if uses is not None:
        _assign_by_use(partition, uses)
    if check_ties:
        _refuse_ties(model, partition)
    return partition


def _join(owner: str, own: str) -> str:
    return f"{owner}.{own}" if owner else own


def _assign_by_use(partition: Partition, uses: Mapping[str, set[int]]) -> None:
    found: dict[str, set[int]] = {}
    for tensor, stages in uses.items():
        found.setdefault(partition.part_of(tensor) or tensor, set()).update(stages)
    for name, stages in found.items():
        if len(stages) > 1:
            raise CannotCutError(_used_in_several(name, stages, partition))
        if name in partition.loose_parameters:
            partition.loose_parameters[name] = min(stages)
        elif partition.parts.get(name) is not None:
            partition.parts[name] = min(stages)


def require_use_in_own_stage(partition: Partition, uses: Mapping[str, set[int]]) -> None:
    """Refuse a partition in which a stage uses parameters that another stage owns."""
    for tensor, stages in uses.items():
        owner = partition.stage_of(tensor)
        if owner is None or stages == {owner}:
            continue
        if len(stages) > 1:
            raise CannotCutError(_used_in_several(tensor, stages, partition))
        raise CannotCutError(
            f"{tensor} was given to stage {owner}, because of the place where the model registers it, and the forward "
            f"pass takes it in stage {min(stages)}. With PipelineConfig(example_inputs=...) every parameter is given "
            "to the stage that takes it."
        )


def _used_in_several(name: str, stages: set[int], partition: Partition) -> str:
    return (
        f"{name} is used in stages {', '.join(map(str, sorted(stages)))} of {partition.num_stages}, and a parameter "
        f"can live in one of them only (stages begin with {', '.join(partition.starts)}). Cut elsewhere with "
        "PipelineConfig(split_at=[...]), or give every stage its own."
    )


def _refuse_ties(model: nn.Module, partition: Partition) -> None:
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    for tied in names.values():
        stages = {partition.stage_of(name) for name in tied}
        if len(stages) > 1:
            places = ", ".join(f"{name} (stage {partition.stage_of(name)})" for name in tied)
            raise CannotCutError(
                f"One parameter has the names {places}: tied parameters must lie in one stage, because their "
                "gradients come from both places. Untie them (give the head a weight of its own), or cut so that both "
                "are in one stage."
            )


def parameters_of_other_stages(model: nn.Module, partition: Partition, stages: Sequence[int]) -> list[torch.Tensor]:
    """Return the parameters that none of these stages owns."""
    return [param for name, param in model.named_parameters() if partition.stage_of(name) not in stages]
