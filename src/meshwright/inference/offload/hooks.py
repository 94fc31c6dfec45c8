"""Hooks around the forward pass of a module: they load its weights and inputs to a device, and offload them again.

A hook is stored as `module._hf_hook`, and the original forward pass as `module._old_forward`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from ...runtime.collectives.nested import find_device, send_to_device
from ...runtime.devices.device import clear_device_cache, default_device, is_cpu
from ...runtime.modules import owner_of
from ..tensors import (
    META,
    READS_CHILD_WEIGHTS,
    Device,
    TiedTensors,
    as_device,
    as_parameter,
    named_module_tensors,
    named_tensors_with_duplicates,
    set_module_tensor_to_device,
    tensors_with,
)
from .streaming import Layer, WeightStream
from .weights import PrefixedDataset

_accelerate_added_attributes = ["to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa"]


class ModelHook:
    """The base class of hooks around a forward pass; its methods change nothing."""

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepare the module when the hook is added to it."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for the forward pass."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return the output for the caller."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Restore the module when the hook is removed."""
        return module

    def forward_failed(self, module: nn.Module) -> None:
        """Undo `pre_forward`, because `post_forward` will not be called."""


class SequentialHook(ModelHook):
    """Several hooks, one after the other."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Initialise each hook."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pass the arguments through all hooks."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Pass the output through all hooks."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Detach each hook."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module

    def forward_failed(self, module: nn.Module) -> None:
        """Undo `pre_forward` of each hook."""
        for hook in self.hooks:
            hook.forward_failed(module)


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Run a hook around the forward pass of a module, in place of its current hook or, with `append`, after it."""
    present = getattr(module, "_hf_hook", None)
    module = hook.init_hook(module)
    if append and present is not None:
        before = present.hooks if isinstance(present, SequentialHook) else (present,)
        hook = SequentialHook(*before, hook)
    old_forward: Any = vars(module).get("_old_forward") or _forward_of(module)
    module._old_forward = old_forward
    module._hf_hook = hook  # type: ignore[assignment]
    with_hook = functools.partial(_forward_with_hook, module)
    module.forward = functools.update_wrapper(with_hook, old_forward)
    return module


def _forward_of(module: nn.Module) -> Any:
    """Return the forward pass of a module; for a traced one it follows later calls of `recompile()`."""
    if isinstance(module, GraphModule) and "forward" not in vars(module):
        return functools.update_wrapper(functools.partial(_forward_of_class, module), module.forward)
    return module.forward


def _forward_of_class(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def _forward_with_hook(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    # Both are looked up at each call, because other libraries replace them.
    hook: Any = module._hf_hook
    forward: Any = module._old_forward
    try:
        args, kwargs = hook.pre_forward(module, *args, **kwargs)
        if hook.no_grad:
            with torch.no_grad():
                output = forward(*args, **kwargs)
        else:
            output = forward(*args, **kwargs)
    except BaseException:
        hook.forward_failed(module)
        raise
    return hook.post_forward(module, output)


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove the hook of a module, and with `recurse` those of its submodules; offloaded weights are loaded."""
    hook: Any = getattr(module, "_hf_hook", None)
    if hook is not None:
        hook.detach_hook(module)
        del module._hf_hook
    if "_old_forward" in vars(module):
        old_forward: Any = module._old_forward
        if getattr(old_forward, "func", None) is _forward_of_class:
            del module.forward
        else:
            module.forward = old_forward
        del module._old_forward
    for name in _accelerate_added_attributes:
        vars(module).pop(name, None)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of a module and its submodules."""
    remove_hook_from_module(module, recurse=True)


# --- Devices ----------------------------------------------------------------------------------------------------------


class AlignDevicesHook(ModelHook):
    """Move inputs and weights to the device on which a module computes.

    With `offload` the weights are in `weights_map` and are loaded for the forward pass only; otherwise they are moved
    once. `io_same_device` returns the output to the device of the input. `place_submodules` includes the tensors of all
    submodules, not only the direct ones. Arguments named in `skip_keys` are not moved.
    """

    def __init__(
        self,
        execution_device: Device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Any] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | list[str] | None = None,
        tied_params_map: TiedTensors | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.input_device: torch.device | None = None
        self.param_original_devices: dict[str, torch.device] = {}
        self.buffer_original_devices: dict[str, torch.device] = {}
        self.tied_params_names: set[str] = set()
        """Weights that are not loaded, because a tied module keeps them on the same device."""
        self.tied_params_map = tied_params_map
        self._layer: Layer | None = None
        self._stream: WeightStream | None = None
        self._placeholders: list[tuple[dict[str, Any], str, Tensor]] = []
        """While the weights are loaded: the dictionary and the name of each, and its tensor on meta."""
        self._depth = 0

    def __repr__(self) -> str:
        shown = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys")
        return f"AlignDevicesHook({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the weights to the device, or offload them."""
        if self.execution_device is not None and as_device(self.execution_device) == META:
            self.tied_params_map = None
        if not self.offload:
            if self.execution_device is not None:
                for name, _ in named_tensors_with_duplicates(module, recurse=self.place_submodules):
                    self._set(module, name, self.execution_device)
            return module
        tensors = named_tensors_with_duplicates(module, recurse=self.place_submodules)
        self.original_devices = {name: tensor.device for name, tensor in tensors}
        offloaded = self._offloaded(module)
        if self.weights_map is None:
            self.weights_map = {name: tensor.detach().to("cpu") for name, tensor in offloaded}
        for name, _ in offloaded:
            self._set(module, name, META)
        if self.execution_device is not None:
            stay = {name for name, _ in tensors} - {name for name, _ in offloaded}
            for name in stay:
                self._set(module, name, self.execution_device)
        self._layer = Layer(self.weights_map, {name: _wanted_dtype(tensor) for name, tensor in offloaded})
        if isinstance(self.weights_map, PrefixedDataset):
            self._stream = WeightStream.of(self.weights_map.dataset)
            self._stream.add(self._layer)
        return module

    def _offloaded(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        return named_tensors_with_duplicates(
            module, self.offload_buffers, self.place_submodules, remove_non_persistent=True
        )

    def _set(self, module: nn.Module, name: str, device: Device, value: Tensor | None = None) -> None:
        tied = self.tied_params_map
        set_module_tensor_to_device(module, name, device, value, tied_params_map=tied, clear_cache=False)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Load the weights, and move the arguments."""
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        if self.offload:
            self._load_weights(module)
        if self.execution_device is None:
            return args, kwargs
        device = as_device(self.execution_device)
        return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=self.skip_keys)

    def _load_weights(self, module: nn.Module) -> None:
        if self._depth:  # the module calls itself
            self._depth += 1
            return
        device = default_device() if self.execution_device is None else as_device(self.execution_device)
        layer = self._current_layer(module)
        weights = layer.load(device) if self._stream is None else self._stream.fetch(layer, device)
        self._depth = 1
        moved: dict[int, Tensor] = {}  # tied weights within the module are moved once
        for name, value in weights.items():
            owner, own_name = owner_of(module, name)
            store = tensors_with(owner, own_name)
            placeholder = store[own_name]
            if name in self.tied_params_names:
                continue
            if id(value) not in moved:
                moved[id(value)] = value.detach().to(device, non_blocking=True)
            placed = moved[id(value)]
            self._placeholders.append((store, own_name, placeholder))
            if store is owner._parameters and not isinstance(placed, nn.Parameter):
                placed = moved[id(value)] = as_parameter(placed, like=placeholder)
            store[own_name] = placed

    def _current_layer(self, module: nn.Module) -> Layer:
        """Return the layer; make a new one if another library has replaced the weights or the parameters."""
        layer = self._layer
        names = [name for name, _ in self._offloaded(module) if name not in self.tied_params_names]
        if layer is None or layer.weights is not self.weights_map or list(layer.dtypes) != names:
            assert self.weights_map is not None
            tensors = dict(self._offloaded(module))
            layer = self._layer = Layer(self.weights_map, {name: _wanted_dtype(tensors[name]) for name in names})
        return layer

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Offload the weights, and move the output to the device of the input."""
        self.forward_failed(module)
        if self.io_same_device and self.input_device is not None:
            return send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Offload the weights."""
        if self._depth:
            self._depth -= 1
        if self._depth == 0 and self._placeholders:
            for store, name, placeholder in self._placeholders:
                store[name] = placeholder
            self._placeholders.clear()
            if self._layer is not None:
                self._layer.release()

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Load the weights that the module had when the hook was added."""
        if self.offload:
            for name, device in self.original_devices.items():
                owner, own_name = owner_of(module, name)
                current = getattr(owner, own_name)
                if device == META or not current.is_meta:
                    continue
                value = self.weights_map.get(name) if self.weights_map is not None else None
                if value is not None:
                    set_module_tensor_to_device(module, name, device, value=value.clone(), clear_cache=False)
        return module


def _wanted_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype for a stored weight, or None for quantised weights, which are not converted."""
    return tensor.dtype if type(tensor) in (Tensor, nn.Parameter) else None


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedTensors | None = None,
) -> None:
    """Attach a hook that moves the inputs to a device to every module with weights and without a hook."""
    if not hasattr(module, "_hf_hook") and next(module.parameters(), next(module.buffers(), None)) is not None:
        add_hook_to_module(
            module, AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        )
    if _is_preloaded(module, preload_module_classes):
        return
    for child in module.children():
        attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedTensors | None = None,
) -> None:
    """Attach a hook that loads the weights for the forward pass to every module with direct tensors.

    Modules of `preload_module_classes` load the weights of all their submodules at once.
    """
    preload = offload and _is_preloaded(module, preload_module_classes)
    has_tensors = next(named_module_tensors(module, recurse=preload), None) is not None
    if has_tensors and not _loads_from(module, weights_map):
        prefix = f"{module_name}." if module_name else ""
        hook = AlignDevicesHook(
            execution_device=execution_device,
            offload=offload,
            weights_map=None if weights_map is None else PrefixedDataset(weights_map, prefix),
            offload_buffers=offload_buffers,
            place_submodules=preload,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        add_hook_to_module(module, hook, append=True)
    if preload:
        return
    for name, child in module.named_children():
        attach_align_device_hook(
            child,
            execution_device,
            offload,
            weights_map,
            offload_buffers,
            f"{module_name}.{name}" if module_name else name,
            skip_keys,
            preload_module_classes,
            tied_params_map,
        )


def _is_preloaded(module: nn.Module, preload_module_classes: list[str] | None) -> bool:
    return type(module).__name__ in (preload_module_classes or ()) or isinstance(module, READS_CHILD_WEIGHTS)


def _loads_from(module: nn.Module, weights_map: Mapping[str, Any] | None) -> bool:
    """Tell whether a module already has a hook for these weights, under another of its names."""
    hook = getattr(module, "_hf_hook", None)
    maps = [getattr(one, "weights_map", None) for one in getattr(hook, "hooks", [hook])]
    return any(isinstance(one, PrefixedDataset) and one.dataset is weights_map for one in maps)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Device | Mapping[str, Device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedTensors | None = None,
) -> None:
    """Attach hooks to the modules of a device map: `execution_device` and `offload` are given by name, or for all.

    Names of direct tensors of a module with children are allowed. Such a module computes with its tensors and with the
    outputs of its children, so the children return their outputs to the device of their inputs.
    """
    devices = execution_device if isinstance(execution_device, Mapping) else {module_name: execution_device}
    offloaded = offload if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
    options = _BlockOptions(devices, offloaded, weights_map, offload_buffers, skip_keys, preload_module_classes)
    options.tied_params_map = tied_params_map
    _attach_to_block(module, module_name, module_name == "", options)


class _BlockOptions:
    """The options that all blocks of a model share."""

    tied_params_map: TiedTensors | None = None

    def __init__(
        self,
        devices: Mapping[str, Any],
        offloaded: Mapping[str, bool],
        weights_map: Mapping[str, Any] | None,
        offload_buffers: bool,
        skip_keys: str | list[str] | None,
        preload_module_classes: list[str] | None,
    ) -> None:
        self.devices, self.offloaded = devices, offloaded
        self.weights_map, self.offload_buffers = weights_map, offload_buffers
        self.skip_keys, self.preload_module_classes = skip_keys, preload_module_classes


def _attach_to_block(module: nn.Module, name: str, returns: bool, options: _BlockOptions) -> None:
    """Attach hooks to a block, or to the blocks in it; `returns` moves its output to the device of its input."""
    dot = f"{name}." if name else ""
    common: dict[str, Any] = {"skip_keys": options.skip_keys, "tied_params_map": options.tied_params_map}
    if name in options.devices and name in options.offloaded:
        device = options.devices[name]
        if options.offloaded[name]:
            attach_align_device_hook(
                module,
                device,
                True,
                options.weights_map,
                options.offload_buffers,
                name,
                options.skip_keys,
                options.preload_module_classes,
                options.tied_params_map,
            )
        elif next(named_module_tensors(module, recurse=True), None) is not None:
            hook = AlignDevicesHook(device, place_submodules=True, offload_buffers=options.offload_buffers, **common)
            add_hook_to_module(module, hook, append=True)
        if device is not None:
            attach_execution_device_hook(
                module, device, options.skip_keys, options.preload_module_classes, options.tied_params_map
            )
        if returns:
            _return_to_input_device(module, device)
        return
    own = [dot + tensor_name for tensor_name, _ in named_module_tensors(module)]
    own = [tensor_name for tensor_name in own if tensor_name in options.devices]
    if own:
        device, is_offloaded = options.devices[own[0]], options.offloaded.get(own[0], False)
        weights = (
            PrefixedDataset(options.weights_map, dot) if is_offloaded and options.weights_map is not None else None
        )
        hook = AlignDevicesHook(
            device, is_offloaded, weights_map=weights, offload_buffers=options.offload_buffers, **common
        )
        add_hook_to_module(module, hook, append=True)
    for child_name, child in module.named_children():
        _attach_to_block(child, dot + child_name, bool(own), options)
    if returns:
        _return_to_input_device(module, options.devices.get(name))


def _return_to_input_device(module: nn.Module, device: Device | None) -> None:
    """Return the output of a module to the device of its input, by its hook or by a new one."""
    hook: Any = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", [hook]):
        if isinstance(one, AlignDevicesHook):
            one.io_same_device = True
            return
    if next(module.parameters(), next(module.buffers(), None)) is not None:
        add_hook_to_module(module, AlignDevicesHook(device, io_same_device=True), append=True)


# --- Whole models, and dtypes -----------------------------------------------------------------------------------------


class CpuOffload(ModelHook):
    """Keep a whole model on the CPU and move it to the device for its forward pass; it stays there until offloaded."""

    def __init__(
        self,
        execution_device: Device | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = default_device() if execution_device is None else execution_device

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the model to the CPU."""
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Offload the previous model, and move this one to the device."""
        if self.prev_module_hook is not None and isinstance(self.prev_module_hook, UserCpuOffloadHook):
            previous = self.prev_module_hook.model
            if previous is not module and not all(is_cpu(p.device) for p in previous.parameters()):
                self.prev_module_hook.offload()
                clear_device_cache()
        device = as_device(self.execution_device)
        module.to(device)
        return send_to_device(args, device), send_to_device(kwargs, device)


class UserCpuOffloadHook:
    """A model and its `CpuOffload`, for pipelines that call their models one after the other."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook of the model."""
        remove_hook_from_module(self.model)


class LayerwiseCastingHook(ModelHook):
    """Store a layer in one dtype and compute in another."""

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Convert the layer to the storage dtype."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Convert the layer to the compute dtype."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Convert the layer to the storage dtype."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Convert the layer to the storage dtype."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
