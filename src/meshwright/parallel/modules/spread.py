"""Recognise models that are spread over processes or devices already when they come to `prepare`.

[Note: already spread] A model may be sharded by `fully_shard`, split by `parallelize_module` or by transformers, or
wrapped in DDP before `prepare`. To spread it again would cut it twice or average its gradients twice. So every strategy
compares the layout that the model has with the requested one. If they are the same, the model is used as it
is; the strategy adds only what is missing. If not, it is refused with both layouts in the message. A layout is compared
by what it means for this process: the ranks that hold the other copies, the other shards of its copy, and the other
parts of its layers. Meshes are not compared as objects, because a user's mesh has its own names and groups.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ...errors import UnsupportedSettingError
from ...errors.callers import warn
from .dtensors import mesh_of

Ranks = tuple[int, ...]

FULLY_SHARD, DTENSORS, REPLICATE, OFFLOAD = "fully_shard()", "DTensors", "replicate()", "offload hooks"
DDP, DATA_PARALLEL, FSDP1 = "DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"
ENGINE, ZERO_INIT = "DeepSpeedEngine", "deepspeed.zero.Init"
_REMEDIES = {
    DDP: "Give prepare() the model inside the wrapper, model.module.",
    DATA_PARALLEL: "Give prepare() the model inside the wrapper, model.module, and start one process per device.",
    FSDP1: "Give prepare() the plain model and Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(...)).",
    REPLICATE: "Give prepare() the plain model.",
    ENGINE: "Give prepare() the plain model and Accelerator(deepspeed_plugin=DeepSpeedPlugin(...)).",
    ZERO_INIT: "Use Accelerator(deepspeed_plugin=DeepSpeedPlugin(...)), or make the model outside of zero.Init.",
    OFFLOAD: "Load the model without device_map, and without cpu_offload or disk_offload.",
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model is spread, as seen from this process."""

    by: str = ""
    """What spread the model; empty for a plain one."""
    words: str = ""
    """The layout in words, with an example parameter."""
    copies: Ranks = ()
    """The ranks with copies of what this rank holds, and this rank; empty if there are none."""
    shards: Ranks = ()
    """The ranks with the shards of this rank's copy, and this rank; empty if it is not sharded."""
    splits: frozenset[Ranks] = frozenset()
    """For each axis along which layers are split, its ranks. They must see the same samples."""
    oddity: str = ""
    """Why no strategy can train the model in this layout."""
    whole: tuple[nn.Parameter, ...] = field(default=(), repr=False)
    """The parameters that `fully_shard` was not given, whose gradients nobody averages."""

    @property
    def stays(self) -> bool:
        """Whether the parts stay on the devices where they are: shards and weights may be kept on the host."""
        return self.by in (FULLY_SHARD, OFFLOAD)

    def require_plain(self, setting: str) -> None:
        """Refuse a setting that replaces layers, whose parameters something else holds already."""
        if self.by:
            raise UnsupportedSettingError(
                f"{setting} with a model that {self.words}",
                "layers are replaced by others before a model is spread.",
                "Give prepare() the plain model, or leave the setting out if its layers are replaced already.",
            )

    @property
    def remedy(self) -> str:
        """Return what to do if the layout does not fit."""
        if self.by in _REMEDIES:
            return _REMEDIES[self.by]
        rows = self.copies, self.shards, max(self.splits, default=())
        sizes = [max(len(row), 1) for row in rows]
        plain = "prepare() the plain model."
        if self.oddity or math.prod(sizes) != dist.get_world_size() or rows != rows_in_order(dist.get_rank(), *sizes):
            return f"Give {plain}"
        names = ("dp_replicate_size", "dp_shard_size", "tp_size")
        config = ", ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True) if size > 1)
        return f"Say Accelerator(parallelism_config=ParallelismConfig({config})), which asks for it, or give {plain}"


def layout_of(model: nn.Module) -> Layout:
    """Return how a model is spread."""
    wrappers = dict(_wrappers_in(model))
    if len(wrappers) > 1:
        return _odd(model, wrappers, f"it is spread by {' and by '.join(wrappers)}.")
    for by, (name, module) in wrappers.items():
        if by == FULLY_SHARD:
            return _sharded(model)
        if name and by != DATA_PARALLEL:
            return _odd(model, wrappers, f"only its part {name} is wrapped.")
        copies = _group_ranks(module) if by in (DDP, REPLICATE) else ()
        over = f" over ranks {_listed(copies)}" if copies else ""
        return Layout(by=by, words=f"is in {by}{over}", copies=copies)
    devices = sorted(map(str, set(getattr(model, "hf_device_map", {}).values())))
    if len(devices) > 1:
        return Layout(by=OFFLOAD, words=f"is spread over {', '.join(devices)} by a device_map")
    if any(_offloads(module) for module in model.modules()):
        return Layout(by=OFFLOAD, words="keeps weights on the host or on disk between its forward passes")
    if any(hasattr(param, "ds_id") for param in model.parameters()):
        return Layout(by=ZERO_INIT, words="has parameters in the partitions of deepspeed.zero.Init")
    return _split(model)


def refuse(layout: Layout, model: nn.Module, asked: str, rank: int) -> NoReturn:
    """Refuse a model whose layout is not the requested one; name both."""
    reason = f"this Accelerator asks for {asked}" + (f", and {layout.oddity}" if layout.oddity else ".")
    name = type(getattr(model, "module", model)).__name__
    spread = f"Rank {rank}: a {name} that was spread before prepare() and {layout.words}"
    raise UnsupportedSettingError(spread, reason, layout.remedy)


def warn_of_splits(layout: Layout, model: nn.Module, same_samples: Ranks) -> None:
    """Warn if layers are split over processes that see different samples: their outputs would be mixed."""
    for ranks in layout.splits:
        if not set(ranks) <= set(same_samples):
            warn(
                f"The {type(model).__name__} {layout.words}. Ranks {_listed(ranks)} compute each of its outputs "
                f"together, and prepared loaders give them different samples. {layout.remedy} Otherwise give all of "
                "them the same batches."
            )
            return


def _wrappers_in(model: nn.Module) -> Iterator[tuple[str, tuple[str, nn.Module]]]:
    """Yield the kinds of wrappers in a model, each with the outermost module of its kind."""
    kinds: dict[str, Any] = {
        DDP: DistributedDataParallel,
        DATA_PARALLEL: DataParallel,
        FSDP1: _imported("torch.distributed.fsdp", "FullyShardedDataParallel"),
        FULLY_SHARD: _imported("torch.distributed.fsdp", "FSDPModule"),
        REPLICATE: _imported("torch.distributed._composable.replicate", "DDP"),
        ENGINE: _imported("deepspeed", "DeepSpeedEngine"),
    }
    found: set[str] = set()
    for name, module in model.named_modules():
        for by, kind in kinds.items():
            if by not in found and isinstance(module, kind) and not _passes_through(module):
                found.add(by)
                yield by, (name.removeprefix("_orig_mod").removeprefix("."), module)


def _passes_through(module: nn.Module) -> bool:
    """Return whether this is a `DataParallel` with no device to spread over."""
    return isinstance(module, DataParallel) and len(module.device_ids) < 2


def _imported(module: str, name: str) -> Any:
    """Return a class of a module if that is imported, else no class: a model cannot have it then."""
    return getattr(sys.modules.get(module), name, ())


def _offloads(module: nn.Module) -> bool:
    hook: Any = getattr(module, "_hf_hook", None)
    return any(getattr(each, "offload", None) is True for each in getattr(hook, "hooks", (hook,)))


def _odd(model: nn.Module, wrappers: dict[str, tuple[str, nn.Module]], oddity: str) -> Layout:
    places = [f"{by} at {name or type(model).__name__}" for by, (name, _) in wrappers.items()]
    return Layout(by="several", words=f"has {', '.join(places)}", oddity=oddity)


def _group_ranks(module: nn.Module) -> Ranks:
    """Return the ranks over which DDP or `replicate` averages."""
    group = getattr(module, "process_group", None)
    if group is None and not isinstance(module, DistributedDataParallel):
        registry: Any = sys.modules["torch.distributed._composable.replicate"]
        given = registry.replicate.state(module)._init_kwargs
        mesh = given.get("device_mesh")
        group = given.get("process_group") or (mesh.get_group() if mesh is not None else None)
    return tuple(dist.get_process_group_ranks(group))


def fsdp_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that `fully_shard` was called on."""
    kind = _imported("torch.distributed.fsdp", "FSDPModule")
    return [module for module in model.modules() if isinstance(module, kind)]


def _sharded(model: nn.Module) -> Layout:
    """Return the layout of a model that `fully_shard` has sharded, all of it or some of its modules."""
    groups = [group for module in fsdp_modules(model) for group in _fsdp_groups(module)]
    roles = {(_row(group.mesh_info, "replicate"), _row(group.mesh_info, "shard")) for group in groups}
    copies, shards = min(roles, default=((), ()))
    managed = {row for group in groups for row in rows_of(group.mesh_info.mesh)}
    splits: set[frozenset[Ranks]] = set()
    whole, spread = [], []
    for name, param in model.named_parameters():
        mesh = mesh_of(param)
        if mesh is None:
            whole.append(param)
            continue
        split = rows_of(mesh) - managed
        splits |= {split} if split else set()
        spread.append((len(split), name, param))
    spread.sort(key=lambda each: -each[0])  # split ones first
    example = described(*spread[0][1:]) if spread else "no parameter"
    oddity = "" if len(roles) == 1 and len(splits) < 2 else "its modules are sharded over different ranks."
    return Layout(
        by=FULLY_SHARD,
        words=f"is sharded by fully_shard(): {example}{_some(whole)}",
        copies=copies,
        shards=shards,
        splits=next(iter(splits), frozenset()),
        oddity=oddity or _oddity(groups, max(len(copies), 1) * max(len(shards), 1), model),
        whole=tuple(whole),
    )


def _oddity(groups: list[Any], size: int, model: nn.Module) -> str:
    """Return why a model that is sharded over so many processes cannot be trained."""
    if any(group.gradient_divide_factor not in (None, size) for group in groups):
        return f"set_gradient_divide_factor() makes its gradients no mean over {size} processes."
    if any(param.is_meta for param in model.parameters()):
        return "it has no weights yet: some are on the meta device."
    return ""


def _fsdp_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch before 2.11 has one per module
    groups = [state._fsdp_param_group] if groups is None else groups
    return [group for group in groups if group is not None]


def sharding_ranks(mesh: Any) -> tuple[Ranks, Ranks]:
    """Return the ranks with copies and those with shards on a mesh for FSDP2: replicate x shard, or shard alone."""
    *copies, shards = (row if len(row) > 1 else () for row in _all_rows(mesh))
    return copies[0] if copies else (), shards


def _row(info: Any, role: str) -> Ranks:
    """Return the ranks along the axis of FSDP2's mesh that has a role; empty for an axis of one."""
    dim = getattr(info, f"{role}_mesh_dim", None)
    row = () if dim is None else _all_rows(info.mesh)[dim]
    return row if len(row) > 1 else ()


def _split(model: nn.Module) -> Layout:
    """Return the layout of a model with DTensors that `fully_shard` did not make, or of a plain model."""
    splits: set[Ranks] = set()
    words = ""
    for name, param in model.named_parameters():
        mesh = mesh_of(param)
        if mesh is not None:
            words = words or f"is split: {described(name, param)}"
            splits |= rows_of(mesh)
    if not words and any(_expects_parts(module) for module in model.modules()):
        words = "was loaded with transformers' tensor parallelism"
        return Layout(by=DTENSORS, words=words, oddity="none of its parameters is split, though its layers expect it.")
    return Layout(by=DTENSORS if words else "", words=words, splits=frozenset(splits))


def _expects_parts(module: nn.Module) -> bool:
    """Return whether transformers has replaced the forward method of a layer by one for its part."""
    return getattr(module.forward, "__qualname__", "").endswith(".install_forward.<locals>.tp_forward")


def rows_of(mesh: Any) -> frozenset[Ranks]:
    """Return the ranks along each axis of a mesh, through this process, that see the same samples.

    Axes of one are left out, and an axis of experts, along which tokens travel.
    """
    names = mesh.mesh_dim_names or [""] * mesh.ndim
    return frozenset(row for axis, row in zip(names, _all_rows(mesh), strict=True) if len(row) > 1 and axis != "ep")


def _all_rows(mesh: Any) -> list[Ranks]:
    own = mesh.get_coordinate()
    if own is None:  # this process is not on the mesh
        return [tuple(mesh.mesh.flatten().tolist())] * mesh.ndim
    rows = []
    for dim in range(mesh.ndim):
        index = (*own[:dim], slice(None), *own[dim + 1 :])
        rows.append(tuple(mesh.mesh[index].tolist()))
    return rows


def rows_in_order(rank: int, *sizes: int) -> tuple[Ranks, ...]:
    """Return the ranks along each axis of a mesh of these sizes, innermost last; empty for an axis of one."""
    rows: list[Ranks] = []
    stride = 1
    for size in reversed(sizes):
        first = rank - rank // stride % size * stride
        rows.append(tuple(range(first, first + size * stride, stride)) if size > 1 else ())
        stride *= size
    return tuple(reversed(rows))


def described(name: str, param: Any) -> str:
    """Return a DTensor in words: its placements, and the axes and ranks of its mesh."""
    mesh = param.device_mesh
    names = mesh.mesh_dim_names or [f"axis {dim}" for dim in range(mesh.ndim)]
    axes = ", ".join(f"{axis}={size}" for axis, size in zip(names, mesh.mesh.shape, strict=True))
    placements = ", ".join(map(str, param.placements))
    return f"{name} is [{placements}] on the mesh ({axes}) of ranks {_listed(mesh.mesh.flatten().tolist())}"


def _some(whole: list[nn.Parameter]) -> str:
    return f", and {len(whole)} of its parameters are whole" if whole else ""


def _listed(ranks: Iterable[int]) -> str:
    """Return ranks in words; a long list is shortened."""
    words = [str(rank) for rank in ranks]
    return ", ".join(words) if len(words) <= 8 else f"{', '.join(words[:3])}, ..., {words[-1]}"


def get_model_tp_size(model: nn.Module) -> int | None:
    """Return the tensor-parallel size that a library recorded on a model, or None.

    It is the model's `tp_size`, or that of `config.distributed_config` in transformers 5.
    """
    size = getattr(model, "tp_size", None)
    if size is None:
        recorded = getattr(getattr(model, "config", None), "distributed_config", None)
        size = recorded.get("tp_size") if isinstance(recorded, Mapping) else getattr(recorded, "tp_size", None)
    return None if size is None else int(size)
