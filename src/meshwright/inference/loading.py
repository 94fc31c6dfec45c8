"""Load the files of a checkpoint directly to the devices of the weights.

Each weight is read into its final memory, or stays in its file if it is offloaded to disk: loading needs the memory of
the model, and no second copy.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.formats.model_files import files_of_model, read_model_files
from ..checkpoint.parts.states import with_ties
from ..errors import UnsupportedSettingError
from ..errors.callers import warn
from ..parallel.modules.dtensors import any_dtensor
from ..runtime.devices.device import is_cpu
from ..runtime.loop.progress import progress
from ..runtime.modules import owner_of
from .dispatch import dispatch
from .offload.weights import Index, SafetensorsFile, TensorFile, offload_weight, read_index, write_index
from .planning.device_map import (
    DeviceMap,
    Place,
    check_device_map,
    get_balanced_memory,
    infer_auto_device_map,
    place_of,
)
from .planning.sizes import as_classes
from .tensors import (
    META,
    as_device,
    as_parameter,
    find_tied_tensors,
    proper_dtype,
    retie_parameters,
    set_module_tensor_to_device,
    tensors_with,
)

logger = logging.getLogger(__name__)

PathLike = str | os.PathLike[str]
AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")


def load_state_dict(checkpoint_file: PathLike, device_map: Mapping[str, Place] | None = None) -> dict[str, Tensor]:
    """Read one file into memory; with a device map, each tensor goes to its device, and those on disk are omitted."""
    file = TensorFile.open(checkpoint_file)
    state: dict[str, Tensor] = {}
    for name in file.names():
        place = "cpu" if device_map is None else place_of(name, device_map)
        if place is not None and str(place) != "disk":
            view = file.view(name)
            state[name] = _read(file, name, torch.empty_like(view)).to(as_device(place))
    return state


def _read(file: TensorFile, name: str, target: Tensor) -> Tensor:
    file.read_into(name, target)
    return target


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: PathLike,
    device_map: Mapping[str, Place] | None = None,
    offload_folder: PathLike | None = None,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load the weights of a model from a file, an index or a folder, including tied ones, directly to their devices.

    Weights for the disk that are in a safetensors file stay there, and the index in `offload_folder` refers to it.
    Others are written into that folder. `dtype` converts floating-point weights, except in modules that
    `keep_in_fp32_modules` names. `strict` requires exactly the names of the model. `offload_state_dict` has no effect,
    because weights for a device are never collected in host memory.
    """
    if offload_8bit_bnb:
        raise UnsupportedSettingError(
            "load_checkpoint_in_model(offload_8bit_bnb=True)",
            "weights of bitsandbytes are not offloaded to disk.",
            "Leave it out.",
        )
    if broadcast_from_rank0 or any_dtensor(model.parameters()):
        _load_over_processes(model, checkpoint, strict, full_state_dict, broadcast_from_rank0)
        return
    if device_map is not None:
        check_device_map(model, device_map)
    loader = _CheckpointLoader(
        model, device_map, offload_folder, offload_buffers, proper_dtype(dtype), keep_in_fp32_modules
    )
    for path in progress(files_of_model(checkpoint), "Loading the model", "files"):
        loader.load(TensorFile.open(path))
    loader.finish(strict)
    if loader.unexpected:
        logger.warning(
            "Some weights of the model checkpoint at %s were not used when initializing %s, which has none of these "
            "names: %s.",
            checkpoint,
            type(model).__name__,
            _some(loader.unexpected),
        )


def _load_over_processes(
    model: nn.Module, checkpoint: PathLike, strict: bool, full_state_dict: bool, broadcast_from_rank0: bool
) -> None:
    """Load a model that is sharded over processes; with `broadcast_from_rank0` only rank 0 reads."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    reads = not broadcast_from_rank0 or not dist.is_initialized() or dist.get_rank() == 0
    state = with_ties(read_model_files(checkpoint), model.state_dict()) if reads else {}
    options = StateDictOptions(
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0 and dist.is_initialized(),
        strict=strict,
    )
    set_model_state_dict(model, state, options=options)


class _CheckpointLoader:
    """One load of a checkpoint: the place of each weight, and which are loaded."""

    def __init__(
        self,
        model: nn.Module,
        device_map: Mapping[str, Place] | None,
        offload_folder: PathLike | None,
        offload_buffers: bool,
        dtype: torch.dtype | None,
        keep_in_fp32: Sequence[str] | None,
    ) -> None:
        self.model = model
        self.device_map = device_map
        self.folder = offload_folder
        self.offload_buffers = offload_buffers
        self.dtype, self.keep_in_fp32 = dtype, tuple(keep_in_fp32 or ())
        self.tied = find_tied_tensors(model)
        self.tied_names = {name: group for group in self.tied for name in group}
        self.wanted = set(model.state_dict())
        self.buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        self.loaded: set[str] = set()
        self.unexpected: list[str] = []
        self.index: Index = {}
        on_disk = [] if device_map is None else [name for name, place in device_map.items() if str(place) == "disk"]
        if on_disk and offload_folder is None:
            raise ValueError(
                f"The device_map puts {len(on_disk)} module(s) on disk ({', '.join(on_disk[:8])}): give "
                "`offload_folder`, the folder for their index and weights."
            )

    def load(self, file: TensorFile) -> None:
        """Load the weights of the model that a file holds."""
        for name in file.names():
            if name not in self.wanted:
                self.unexpected.append(name)
                continue
            places = {str(self._place(tied_name)) for tied_name in self.tied_names.get(name, [name])}
            if "disk" in places:
                self._offload_to_disk(file, name)
            if places != {"disk"}:
                self._place_weight(file, name)
            self.loaded |= set(self.tied_names.get(name, [name]))

    def _place(self, name: str) -> Place | None:
        if self.device_map is None:
            return None
        place = place_of(name, self.device_map)
        return "cpu" if place == "disk" and name in self.buffers and not self.offload_buffers else place

    def _dtype(self, name: str, stored: torch.dtype) -> torch.dtype:
        if not stored.is_floating_point:
            return stored
        if self.dtype is not None:
            in_fp32 = any(part in name.split(".") or part in name for part in self.keep_in_fp32)
            return torch.float32 if in_fp32 else self.dtype
        current = getattr(*owner_of(self.model, name))
        return current.dtype if current is not None and current.dtype.is_floating_point else stored

    def _offload_to_disk(self, file: TensorFile, name: str) -> None:
        assert self.folder is not None
        view = file.view(name)
        wanted = self._dtype(name, view.dtype)
        names = [tied_name for tied_name in self.tied_names.get(name, [name]) if self._place(tied_name) == "disk"]
        if isinstance(file, SafetensorsFile) and wanted == view.dtype:
            entry = {"safetensors_file": str(file.path.resolve()), "weight_name": name}
            entry["dtype"] = str(wanted).removeprefix("torch.")
            self.index |= dict.fromkeys(names, entry)
            Path(self.folder).mkdir(parents=True, exist_ok=True)
        else:
            offload_weight(view.to(wanted), names[0], self.folder, self.index)  # the other names find it by their tie
        if self.dtype is not None:
            for tied_name in names:  # the placeholder on meta shows the dtype
                set_module_tensor_to_device(self.model, tied_name, META, dtype=wanted, clear_cache=False)
            retie_parameters(self.model, [names])

    def _place_weight(self, file: TensorFile, name: str) -> None:
        """Read a weight to the device of each of its tied names; usually that is one."""
        names = [tied_name for tied_name in self.tied_names.get(name, [name]) if self._place(tied_name) != "disk"]
        stored = file.view(name)
        placed: dict[torch.device, Tensor] = {}
        for tied_name in names:
            owner, own_name = owner_of(self.model, tied_name)
            store = tensors_with(owner, own_name)
            current = store[own_name]
            device = self._device(tied_name, current)
            if device not in placed:
                placed[device] = self._read_weight(file, name, stored, current, device)
            if placed[device] is not current:
                is_parameter = store is owner._parameters and not isinstance(placed[device], nn.Parameter)
                if is_parameter:
                    placed[device] = as_parameter(placed[device], like=stored if current is None else current)
                store[own_name] = placed[device]

    def _device(self, name: str, current: Tensor | None) -> torch.device:
        place = self._place(name)
        if place is not None:
            return as_device(place)
        return torch.device("cpu") if current is None or current.is_meta else current.device

    def _read_weight(
        self, file: TensorFile, name: str, stored: Tensor, current: Tensor | None, device: torch.device
    ) -> Tensor:
        """Return a tensor with the weight: the current one, if device and dtype match, or a new one."""
        if current is not None and current.shape != stored.shape:
            raise ValueError(
                f"{name} has the shape {tuple(current.shape)} in the model and {tuple(stored.shape)} in {file.path}: "
                "the checkpoint is of another model."
            )
        dtype = self._dtype(name, stored.dtype)
        is_usable = current is not None and not current.is_meta and current.device == device
        if current is not None and is_usable and current.dtype == dtype:
            file.read_into(name, current)
            return current
        host = torch.empty(stored.shape, dtype=dtype if is_cpu(device) else stored.dtype)
        file.read_into(name, host)
        return host if is_cpu(device) else host.to(device, dtype)

    def finish(self, strict: bool) -> None:
        """Tie weights, write the index, and report missing weights."""
        retie_parameters(self.model, [group for group in self.tied if self._in_one_place(group)])
        if self.folder is not None and self.index:
            known = read_index(self.folder)  # another checkpoint file of the same model may have been loaded before
            kept = {name: entry for name, entry in known.items() if name in self.wanted - self.loaded}
            write_index(kept | self.index, self.folder)
        missing = [name for name in self.model.state_dict() if name in self.wanted and name not in self.loaded]
        if strict and (missing or self.unexpected):
            raise RuntimeError(
                f"The checkpoint is not that of this {type(self.model).__name__}: it lacks {_some(missing)}, and holds "
                f"{_some(self.unexpected)}, which the model does not have. Pass strict=False to load what fits."
            )
        empty = [name for name in missing if getattr(*owner_of(self.model, name)).is_meta]
        if empty:
            warn(
                f"The checkpoint has no values for {len(empty)} tensors that are on the meta device and stay there: "
                f"{_some(empty)}. The model cannot run before they are loaded.",
            )

    def _in_one_place(self, group: Sequence[str]) -> bool:
        return len({str(self._place(name)) for name in group}) == 1


def _some(names: Sequence[str]) -> str:
    return (", ".join(names[:8]) + (f", and {len(names) - 8} more" if len(names) > 8 else "")) or "nothing"


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: PathLike,
    device_map: str | Mapping[str, Place] | None = None,
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: str | list[str] | None = None,
    offload_folder: PathLike | None = None,
    offload_buffers: bool = False,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Load a checkpoint into a model, usually one made with `init_empty_weights`, and dispatch it by a device map.

    `device_map` is a map, or "auto" and "balanced" (equal parts on all accelerators), "balanced_low_0" (little on the
    first), "sequential" (one after the other); without one, the weights are loaded and the model is not dispatched.
    """
    tied = find_tied_tensors(model)  # loading tied weights to different devices unties them
    if isinstance(device_map, str):
        device_map = _automatic_device_map(
            model, device_map, max_memory, no_split_module_classes, dtype, offload_buffers
        )
    load_checkpoint_in_model(
        model,
        checkpoint,
        device_map=device_map,
        offload_folder=offload_folder,
        dtype=dtype,
        offload_state_dict=bool(offload_state_dict),
        offload_buffers=offload_buffers,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    if device_map is None:
        return model
    return dispatch(
        model,
        device_map,
        tied,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )


def _automatic_device_map(
    model: nn.Module,
    kind: str,
    max_memory: Mapping[Any, int | str] | None,
    no_split_module_classes: str | list[str] | None,
    dtype: torch.dtype | str | None,
    offload_buffers: bool,
) -> DeviceMap:
    if kind not in AUTOMATIC:
        raise ValueError(f"device_map={kind!r} is not known: choose from {', '.join(AUTOMATIC)}, or give a map.")
    whole = sorted(as_classes(no_split_module_classes))
    if kind != "sequential":
        max_memory = get_balanced_memory(model, max_memory, whole, dtype, low_zero=kind == "balanced_low_0")
    return infer_auto_device_map(model, max_memory, whole, dtype, offload_buffers=offload_buffers)
