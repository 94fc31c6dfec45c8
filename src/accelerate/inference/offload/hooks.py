"""Hooks around a module's forward pass: they move what it needs to where it is computed, and put it away again.

A hook lives in `module._hf_hook`; the forward pass it surrounds is kept as `module._old_forward`.
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
    READ_THEIR_CHILDREN,
    Device,
    TiedTensors,
    all_names_of_tensors,
    as_device,
    as_parameter,
    named_module_tensors,
    set_module_tensor_to_device,
)
from .streaming import Layer, WeightStream
from .weights import PrefixedDataset

_accelerate_added_attributes = ["to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa"]


class ModelHook:
    """What can be done around a forward pass; each method leaves everything as it is."""

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Be told of the module when the hook is added to it."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments that the forward pass will get."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return the output that the caller will get."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Leave the module as it was."""
        return module

    def forward_failed(self, module: nn.Module) -> None:
        """Put away what `pre_forward` brought, because `post_forward` will not be called."""


class SequentialHook(ModelHook):
    """Several hooks, one after the other."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Tell each hook."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Hand the arguments from hook to hook."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Hand the output from hook to hook."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Detach each hook."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module

    def forward_failed(self, module: nn.Module) -> None:
        """Tell each hook."""
        for hook in self.hooks:
            hook.forward_failed(module)


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Run a hook around the forward pass of a module, instead of the one that is there or, with `append`, after it."""
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
    """Return what a module's forward pass is: of a traced one, whatever `recompile()` has made of its class by then."""
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
    """Take the hook off a module, and with `recurse` off all modules in it; weights that were away come back."""
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
    """Take the hooks off a module and all modules in it."""
    remove_hook_from_module(module, recurse=True)


# --- Devices ----------------------------------------------------------------------------------------------------------


class AlignDevicesHook(ModelHook):
    """Bring inputs and weights to the device a module computes on.

    With `offload` the weights are elsewhere, in `weights_map`, and come for the forward pass only; otherwise they are
    moved once. `io_same_device` returns the output to where the input was. `place_submodules` is for all that is in the
    module, not only for its own tensors. Arguments named in `skip_keys` are not moved.
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
        """Weights that stay, because a module that is tied to this one has them on the same device."""
        self.tied_params_map = tied_params_map
        self._layer: Layer | None = None
        self._stream: WeightStream | None = None
        self._away: list[tuple[dict[str, Any], str, Tensor]] = []
        """While the weights are here: whose they are, their name, and what stands for them otherwise."""
        self._depth = 0

    def __repr__(self) -> str:
        shown = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys")
        return f"AlignDevicesHook({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the weights to the device, or away."""
        if self.execution_device is not None and as_device(self.execution_device) == META:
            self.tied_params_map = None
        if not self.offload:
            if self.execution_device is not None:
                for name, _ in all_names_of_tensors(module, recurse=self.place_submodules):
                    self._set(module, name, self.execution_device)
            return module
        tensors = all_names_of_tensors(module, recurse=self.place_submodules)
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
        return all_names_of_tensors(module, self.offload_buffers, self.place_submodules, remove_non_persistent=True)

    def _set(self, module: nn.Module, name: str, device: Device, value: Tensor | None = None) -> None:
        tied = self.tied_params_map
        set_module_tensor_to_device(module, name, device, value, tied_params_map=tied, clear_cache=False)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bring the weights and the arguments."""
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        if self.offload:
            self._bring(module)
        if self.execution_device is None:
            return args, kwargs
        device = as_device(self.execution_device)
        return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=self.skip_keys)

    def _bring(self, module: nn.Module) -> None:
        if self._depth:  # the module calls itself
            self._depth += 1
            return
        device = default_device() if self.execution_device is None else as_device(self.execution_device)
        layer = self._current_layer(module)
        weights = layer.load(device) if self._stream is None else self._stream.fetch(layer, device)
        self._depth = 1
        here: dict[int, Tensor] = {}  # what is tied within the module comes once
        for name, value in weights.items():
            owner, own_name = owner_of(module, name)
            store: dict[str, Any] = owner._buffers if own_name in owner._buffers else owner._parameters
            away = store[own_name]
            if name in self.tied_params_names:
                continue
            if id(value) not in here:
                here[id(value)] = value.detach().to(device, non_blocking=True)
            placed = here[id(value)]
            self._away.append((store, own_name, away))
            if store is owner._parameters and not isinstance(placed, nn.Parameter):
                placed = here[id(value)] = as_parameter(placed, like=away)
            store[own_name] = placed

    def _current_layer(self, module: nn.Module) -> Layer:
        """Return the layer; other libraries give a hook other weights, or a module other parameters."""
        layer = self._layer
        names = [name for name, _ in self._offloaded(module) if name not in self.tied_params_names]
        if layer is None or layer.weights is not self.weights_map or list(layer.dtypes) != names:
            assert self.weights_map is not None
            tensors = dict(self._offloaded(module))
            layer = self._layer = Layer(self.weights_map, {name: _wanted_dtype(tensors[name]) for name in names})
        return layer

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Put the weights away, and the output where the input was."""
        self.forward_failed(module)
        if self.io_same_device and self.input_device is not None:
            return send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Put the weights away."""
        if self._depth:
            self._depth -= 1
        if self._depth == 0 and self._away:
            for store, name, away in self._away:
                store[name] = away
            self._away.clear()
            if self._layer is not None:
                self._layer.let_go()

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Bring back for good what was in the module when the hook was added."""
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
    """Return the dtype that a stored weight must take; quantised ones have their own way of being stored."""
    return tensor.dtype if type(tensor) in (Tensor, nn.Parameter) else None


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedTensors | None = None,
) -> None:
    """Let every module that has weights and no hook bring its inputs to a device."""
    if not hasattr(module, "_hf_hook") and next(module.parameters(), next(module.buffers(), None)) is not None:
        add_hook_to_module(
            module, AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        )
    if _comes_whole(module, preload_module_classes):
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
    """Let every module that holds tensors bring them for its own forward pass.

    Modules of `preload_module_classes` bring all that is in them at once.
    """
    preload = offload and _comes_whole(module, preload_module_classes)
    has_tensors = next(named_module_tensors(module, recurse=preload), None) is not None
    if has_tensors and not _brings_from(module, weights_map):
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


def _comes_whole(module: nn.Module, preload_module_classes: list[str] | None) -> bool:
    return type(module).__name__ in (preload_module_classes or ()) or isinstance(module, READ_THEIR_CHILDREN)


def _brings_from(module: nn.Module, weights_map: Mapping[str, Any] | None) -> bool:
    """Tell whether a module has its hook already, under another of its names."""
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
    """Attach hooks to the modules that a device map names: `execution_device` and `offload` by name, or for all.

    Names of tensors are allowed for those that a module with children holds itself. Such a module computes with its own
    tensors and with what its children return, so these return their outputs to where their inputs were.
    """
    devices = execution_device if isinstance(execution_device, Mapping) else {module_name: execution_device}
    away = offload if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
    options = _BlockOptions(devices, away, weights_map, offload_buffers, skip_keys, preload_module_classes)
    options.tied_params_map = tied_params_map
    _attach_to_block(module, module_name, module_name == "", options)


class _BlockOptions:
    """What all blocks of a model have in common."""

    tied_params_map: TiedTensors | None = None

    def __init__(
        self,
        devices: Mapping[str, Any],
        away: Mapping[str, bool],
        weights_map: Mapping[str, Any] | None,
        offload_buffers: bool,
        skip_keys: str | list[str] | None,
        preload_module_classes: list[str] | None,
    ) -> None:
        self.devices, self.away = devices, away
        self.weights_map, self.offload_buffers = weights_map, offload_buffers
        self.skip_keys, self.preload_module_classes = skip_keys, preload_module_classes


def _attach_to_block(module: nn.Module, name: str, returns: bool, options: _BlockOptions) -> None:
    """Hook a block, or look for blocks in it; `returns` sends its output to where its input was."""
    dot = f"{name}." if name else ""
    common: dict[str, Any] = {"skip_keys": options.skip_keys, "tied_params_map": options.tied_params_map}
    if name in options.devices and name in options.away:
        device = options.devices[name]
        if options.away[name]:
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
            _let_it_return(module, device)
        return
    own = [dot + tensor_name for tensor_name, _ in named_module_tensors(module)]
    own = [tensor_name for tensor_name in own if tensor_name in options.devices]
    if own:
        device, is_away = options.devices[own[0]], options.away.get(own[0], False)
        weights = PrefixedDataset(options.weights_map, dot) if is_away and options.weights_map is not None else None
        hook = AlignDevicesHook(device, is_away, weights_map=weights, offload_buffers=options.offload_buffers, **common)
        add_hook_to_module(module, hook, append=True)
    for child_name, child in module.named_children():
        _attach_to_block(child, dot + child_name, bool(own), options)
    if returns:
        _let_it_return(module, options.devices.get(name))


def _let_it_return(module: nn.Module, device: Device | None) -> None:
    """Send a module's output to where its input was, by the hook it has or by one that does only this."""
    hook: Any = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", [hook]):
        if isinstance(one, AlignDevicesHook):
            one.io_same_device = True
            return
    if next(module.parameters(), next(module.buffers(), None)) is not None:
        add_hook_to_module(module, AlignDevicesHook(device, io_same_device=True), append=True)


# --- Whole models, and dtypes -----------------------------------------------------------------------------------------


class CpuOffload(ModelHook):
    """Keep a whole model on the CPU and bring it for its forward pass, after which it stays until it is sent back."""

    def __init__(
        self,
        execution_device: Device | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = default_device() if execution_device is None else execution_device

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Send the model to the CPU."""
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Send the previous model back and bring this one."""
        if self.prev_module_hook is not None and isinstance(self.prev_module_hook, UserCpuOffloadHook):
            previous = self.prev_module_hook.model
            if previous is not module and not all(is_cpu(p.device) for p in previous.parameters()):
                self.prev_module_hook.offload()
                clear_device_cache()
        device = as_device(self.execution_device)
        module.to(device)
        return send_to_device(args, device), send_to_device(kwargs, device)


class UserCpuOffloadHook:
    """A model and its `CpuOffload`, for whoever calls the models of a pipeline one after the other."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Send the model back to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Take the hook off the model."""
        remove_hook_from_module(self.model)


class LayerwiseCastingHook(ModelHook):
    """Store a layer in one dtype and compute in another."""

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Begin in the dtype of storage."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Change to the dtype of computing."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Change back."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Change back."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
