"""Dispatch a model by a device map: parts on devices, parts in host memory, parts on disk."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime.devices.device import accelerator_type, default_device
from ..runtime.modules import owner_of
from .offload.hooks import (
    AlignDevicesHook,
    CpuOffload,
    LayerwiseCastingHook,
    SequentialHook,
    UserCpuOffloadHook,
    _accelerate_added_attributes,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    remove_hook_from_submodules,
)
from .offload.weights import (
    OffloadedWeightsLoader,
    extract_submodules_state_dict,
    offload_weight,
    read_index,
    write_index,
)
from .planning.device_map import OFFLOADED, Place, check_device_map, check_tied_parameters_on_same_device
from .tensors import (
    Device,
    TiedTensors,
    as_device,
    check_device_same,
    find_tied_tensors,
    get_non_persistent_buffers,
    named_module_tensors,
    named_tensors_with_duplicates,
    retie_parameters,
    tensors_with,
)

logger = logging.getLogger(__name__)


def cpu_offload(
    model: nn.Module,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep the weights of a model in host memory; load those of each module to a device for its forward pass only."""
    device = default_device() if execution_device is None else execution_device
    if state_dict is None:
        state_dict = {name: tensor.to("cpu") for name, tensor in model.state_dict().items()}
    return _offload_all(model, device, state_dict, offload_buffers, preload_module_classes)


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: Device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a model on the CPU until it is called; it then stays on the device until `offload()` of the returned hook.

    Given the hook of the model that is called before it, it offloads that one first.
    """
    hook = CpuOffload(execution_device=execution_device, prev_module_hook=prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep the weights of a model on disk; those of each module are prefetched for its forward pass.

    A model without values, made with `init_empty_weights`, uses the weights in the folder.
    """
    _write_weights(offload_dir, model.state_dict(), find_tied_tensors(model))
    device = default_device() if execution_device is None else execution_device
    weights = OffloadedWeightsLoader(save_folder=offload_dir)
    return _offload_all(model, device, weights, offload_buffers, preload_module_classes)


def _offload_all(
    model: nn.Module,
    device: Device,
    weights: Mapping[str, Any],
    offload_buffers: bool,
    preload_module_classes: list[str] | None,
) -> nn.Module:
    tied = find_tied_tensors(model)
    weights = _with_aliases(weights, tied)
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    _check_weights(model, {"": "disk"}, {"": True}, weights, offload_buffers)
    attach_align_device_hook(
        model, device, True, weights, offload_buffers, preload_module_classes=preload_module_classes
    )
    retie_parameters(model, tied)
    return model


def _with_aliases(weights: Mapping[str, Any], tied: Sequence[Sequence[str]]) -> Mapping[str, Any]:
    """Add aliases, so that every name of a tied weight finds the stored one."""
    missing = [name for group in tied for name in group if name not in weights]
    if not missing:
        return weights
    loader = weights if isinstance(weights, OffloadedWeightsLoader) else OffloadedWeightsLoader(state_dict=weights)
    for group in tied:
        stored = next((name for name in group if name in weights), None)
        if stored is not None:
            loader.aliases |= {name: stored for name in group if name not in weights}
    loader.all_keys += [name for name in loader.aliases if name not in loader.all_keys]
    return loader


def _write_weights(folder: str | os.PathLike[str], state: Mapping[str, Tensor], tied: Sequence[Sequence[str]]) -> None:
    """Write the weights that have values, tied ones once.

    Weights without values must be in the folder already. Other entries of an earlier index are dropped.
    """
    duplicates = {name for group in tied for name in [n for n in group if n in state][1:]}
    missing = [name for name, tensor in state.items() if tensor.is_meta]
    index = {name: entry for name, entry in read_index(folder).items() if name in missing}
    if missing and not index:
        raise ValueError(
            f"{len(missing)} weights cannot be written to {folder}, because they are on the meta device and have no "
            f"values: {_some(missing)}. Load the model first, or give their values as `state_dict` or `offload_index`."
        )
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, tensor in state.items():
        if name not in duplicates and not tensor.is_meta:
            offload_weight(tensor, name, folder, index)
    write_index(index, folder)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


# --- dispatch_model ---------------------------------------------------------------------------------------------------


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Place],
    main_device: Device | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Put the parts of a model on the devices of a device map, and attach the hooks to run it.

    Parts on "cpu" (beside an accelerator) and on "disk" are computed on `main_device`, by default the first accelerator
    of the map; their weights are loaded to it for their forward pass only. Weights for the disk are written to
    `offload_dir`, except those without values, which the index of the folder or `offload_index` must list.
    """
    return dispatch(
        model,
        device_map,
        find_tied_tensors(model),
        main_device,
        state_dict,
        offload_dir,
        offload_index,
        offload_buffers,
        skip_keys,
        preload_module_classes,
        force_hooks,
    )


def dispatch(
    model: nn.Module,
    device_map: Mapping[str, Place],
    tied: Sequence[Sequence[str]],
    main_device: Device | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Dispatch a model like `dispatch_model`, with the tied tensors given by the caller."""
    if any(_offloading_hook(module) is not None for module in model.modules()):
        remove_hook_from_submodules(model)  # it was dispatched before: load the offloaded weights
    check_device_map(model, device_map)
    _check_devices(device_map)
    if _is_one_device(device_map) and not force_hooks:
        _check_nothing_on_meta(model)
        model.to(as_device(next(iter(device_map.values()))))
        model.hf_device_map = dict(device_map)  # type: ignore[assignment]
        return model

    blocks = _blocks(model, device_map)
    execution_devices, offloaded = _execution(blocks, _main_device(device_map) if main_device is None else main_device)
    check_tied_parameters_on_same_device(tied, device_map)
    weights = _offloaded_weights(model, blocks, offloaded, state_dict, offload_dir, offload_index, tied)
    if weights is not None:
        weights = _with_aliases(weights, tied)
    _check_weights(model, blocks, offloaded, weights or {}, offload_buffers)
    attach_align_device_hook_on_blocks(
        model,
        execution_devices,
        offloaded,
        weights,
        offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        tied_params_map=_tied_params_map(model, tied),
    )
    _share_tied_tensors(model, tied)
    _guard_moves(model)
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


def _is_one_device(device_map: Mapping[str, Place]) -> bool:
    """Tell whether a whole model is on one device, and not on disk."""
    places = {place if isinstance(place, int) else str(place) for place in device_map.values()}
    return len(places) == 1 and "disk" not in places


def _main_device(device_map: Mapping[str, Place]) -> Device:
    """Return the device that computes what is offloaded: the first accelerator of a map, or the CPU."""
    return next((place for place in device_map.values() if str(place) not in OFFLOADED), "cpu")


def _execution(blocks: Mapping[str, Place], main_device: Device) -> tuple[dict[str, Device], dict[str, bool]]:
    """Return for each block the device it computes on, and whether it is offloaded until then.

    Blocks on the CPU are offloaded only if the main device is another one.
    """
    offload_places = ("disk",) if as_device(main_device) == torch.device("cpu") else OFFLOADED
    devices = {name: main_device if str(place) in OFFLOADED else place for name, place in blocks.items()}
    devices.setdefault("", main_device)
    return devices, {name: str(place) in offload_places for name, place in blocks.items()}


def _check_devices(device_map: Mapping[str, Place]) -> None:
    kind = accelerator_type()
    count = torch.accelerator.device_count() if kind is not None else 0
    for name, place in device_map.items():
        if str(place) in ("disk", "cpu", "meta"):
            continue
        device = as_device(place)
        if device.type not in ("cpu", "meta", kind) or (device.index or 0) >= max(count, 1):
            there = f"{count} of kind {kind}" if kind is not None else "no accelerator"
            raise ValueError(
                f"The device_map puts {name or 'the model'} on {place}, and this machine has {there}. Make the map on "
                "this machine (infer_auto_device_map), or use 'cpu' and 'disk'."
            )


def _blocks(model: nn.Module, device_map: Mapping[str, Place]) -> dict[str, Place]:
    """Return the map with all direct tensors of a module in one place, because its forward pass uses all of them."""
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    blocks: dict[str, Place] = {}
    first: dict[str, Place] = {}
    for name, place in device_map.items():
        blocks[name] = place if name in modules else first.setdefault(name.rpartition(".")[0], place)
    # Entries that contain others, such as "" for the rest of the model: the inner ones are separate blocks.
    outer = [name for name in blocks if any(_is_inside(other, name) for other in blocks)]
    for name in outer:
        place = blocks.pop(name)
        blocks |= dict.fromkeys(_uncovered(model, name, blocks), place)
    return blocks


def _is_inside(name: str, outer: str) -> bool:
    return name != outer and (not outer or name.startswith(f"{outer}."))


def _uncovered(model: nn.Module, outer: str, blocks: Mapping[str, Any]) -> list[str]:
    """Return the parts of a module that no other entry of the map covers."""
    module = model.get_submodule(outer)
    dot = f"{outer}." if outer else ""
    found: list[str] = [dot + n for n, _ in named_module_tensors(module) if dot + n not in blocks]
    for child_name, _ in module.named_children():
        name = dot + child_name
        if name in blocks:
            continue
        found += _uncovered(model, name, blocks) if any(_is_inside(other, name) for other in blocks) else [name]
    return found


def _offloaded_weights(
    model: nn.Module,
    blocks: Mapping[str, Place],
    offloaded: Mapping[str, bool],
    state_dict: Mapping[str, Tensor] | None,
    offload_dir: str | os.PathLike[str] | None,
    offload_index: Mapping[str, Any] | None,
    tied: Sequence[Sequence[str]],
) -> Mapping[str, Any] | None:
    """Return the offloaded weights: those for the CPU in memory, those for the disk written or found there.

    Return None if nothing is offloaded.
    """
    on_disk = [name for name, place in blocks.items() if str(place) == "disk"]
    on_cpu = [name for name, is_offloaded in offloaded.items() if is_offloaded and name not in on_disk]
    if not on_disk and not on_cpu:
        return None
    given = model.state_dict() if state_dict is None else state_dict
    if not on_disk:
        return OffloadedWeightsLoader(_in_memory(given, on_cpu))
    if offload_index is None:
        if offload_dir is None:
            raise ValueError(
                f"The device_map puts {len(on_disk)} module(s) on disk ({_some(on_disk)}): give `offload_dir`, the "
                "folder for their weights."
            )
        _write_weights(offload_dir, extract_submodules_state_dict(given, on_disk), tied)
    return OffloadedWeightsLoader(_in_memory(given, on_cpu), offload_dir, offload_index)


def _in_memory(state: Mapping[str, Tensor], modules: Sequence[str]) -> dict[str, Tensor]:
    """Return the weights of some modules that have values, on the CPU."""
    found = extract_submodules_state_dict(state, modules)
    return {name: tensor.detach().to("cpu") for name, tensor in found.items() if not tensor.is_meta}


def _check_weights(
    model: nn.Module,
    blocks: Mapping[str, Place],
    offloaded: Mapping[str, bool],
    weights: Mapping[str, Any],
    offload_buffers: bool,
) -> None:
    """Raise if any tensor has no values, before anything is moved."""
    missing: list[str] = []
    temporary = get_non_persistent_buffers(model, recurse=True, fqns=True)
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for name, tensor in named_tensors_with_duplicates(model, recurse=True):
        block = name
        while block and block not in offloaded:
            block = block.rpartition(".")[0]
        stays = name in temporary or (name in buffers and not offload_buffers)
        if offloaded.get(block, False) and not stays:
            if name not in weights:
                missing.append(f"{name} (for {blocks[block]}: neither in the weights given nor in the index)")
        elif tensor.is_meta and str(blocks.get(block)) != "meta":
            kind = "a buffer that checkpoints leave out" if name in temporary else "it was not loaded"
            missing.append(f"{name} (for {blocks.get(block, 'the main device')}: on meta, {kind})")
    if missing:
        raise ValueError(
            f"{len(missing)} tensors of the model have no values: {_some(missing)}. Load a checkpoint that holds them, "
            "tie them before dispatching, or build the model with init_empty_weights(include_buffers=False)."
        )


def _check_nothing_on_meta(model: nn.Module) -> None:
    _check_weights(model, {"": "the device"}, {"": False}, {}, False)


def _tied_params_map(model: nn.Module, tied: Sequence[Sequence[str]]) -> TiedTensors:
    """Return a dictionary for the copies of each tied tensor, so that each device gets one."""
    tensors = [getattr(*owner_of(model, group[0])) for group in tied]
    return {tensor.data_ptr(): {} for tensor in tensors if not tensor.is_meta}


def _share_tied_tensors(model: nn.Module, tied: Sequence[Sequence[str]]) -> None:
    """Tie tensors again. Where one stays on the execution device of another, the other is not loaded."""
    retie_parameters(model, [group for group in tied if _on_one_device(model, group)])
    for group in tied:
        holders = [owner_of(model, name) for name in group]
        resident = [getattr(owner, name) for owner, name in holders if not getattr(owner, name).is_meta]
        for owner, name in holders:
            hook = _offloading_hook(owner)
            if hook is None or not getattr(owner, name).is_meta:
                continue
            for tensor in resident:
                if hook.execution_device is not None and check_device_same(
                    tensor.device, as_device(hook.execution_device)
                ):
                    tensors_with(owner, name)[name] = tensor
                    hook.tied_params_names.add(name)
                    break


def _on_one_device(model: nn.Module, group: Sequence[str]) -> bool:
    return len({getattr(*owner_of(model, name)).device for name in group}) == 1


def _offloading_hook(module: nn.Module) -> AlignDevicesHook | None:
    hook = getattr(module, "_hf_hook", None)
    for one in hook.hooks if isinstance(hook, SequentialHook) else [hook]:
        if isinstance(one, AlignDevicesHook) and one.offload and not one.place_submodules:
            return one
    return None


def _guard_moves(model: nn.Module) -> None:
    """Warn when a dispatched model is moved as a whole, and raise if parts of it are offloaded."""

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def move(*args: Any, **kwargs: Any) -> Any:
            parse: Any = torch._C._nn._parse_to
            if function.__name__ == "to" and parse(*args, **kwargs)[0] is None:
                return function(*args, **kwargs)  # only the dtype changes
            if any(p.is_meta for p in model.parameters()):
                raise RuntimeError(
                    "This model cannot be moved: parts of it are offloaded to the CPU or to disk. Call "
                    "remove_hook_from_submodules(model) first, or dispatch it with another device_map."
                )
            logger.warning("This model is spread by a device_map; moving it puts it on one device.")
            return function(*args, **kwargs)

        return move

    for name in _accelerate_added_attributes:
        if hasattr(model, name):
            setattr(model, name, guarded(getattr(model, name)))


# --- Layerwise casting ------------------------------------------------------------------------------------------------

CASTABLE = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Sequence[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store linear layers and convolutions in a small dtype and cast each for its forward pass.

    Modules whose name matches a pattern, or that are of a skipped class, are not changed, nor are their children.
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    classes = skip_modules_classes or ()
    pending: list[tuple[str, nn.Module]] = [("", module)]
    while pending:
        name, part = pending.pop()
        if isinstance(part, classes) or any(re.search(pattern, name) for pattern in patterns):
            continue
        if isinstance(part, CASTABLE):
            hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
            add_hook_to_module(part, hook, append=True)
        else:
            pending += [(f"{name}.{key}" if name else key, child) for key, child in part.named_children()]
