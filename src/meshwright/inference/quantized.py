"""Models whose linear layers have weights in 8 or 4 bits.

Each layer is read, moved to its device in 16 bits, quantised and freed before the next one, so that memory never holds
more than the quantised model and one layer. bitsandbytes and torchao are imported on use, not with this module.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from ..config.plugins.quantization import BnbQuantizationConfig
from ..errors.callers import warn
from ..runtime.devices.device import accelerator_type, default_device
from ..runtime.loop.progress import progress
from ..runtime.modules import owner_of
from .offload.lazy_files import LazyModelFiles
from .offload.weights import offload_weight
from .tensors import (
    as_device,
    find_tied_parameters,
    find_tied_tensors,
    get_non_persistent_buffers,
    set_module_tensor_to_device,
)

_BLOCK_SIZE = 64
_CODEBOOK_SIZE = 16
_FLOAT_BYTES = torch.float32.itemsize
_TRIM_THRESHOLD = 1 << 18


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: Mapping[str, Any] | str | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: Mapping[Any, int | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Quantise a model in place, with its own weights or with those of a file, an index or a folder, and return it.

    A model on the meta device needs `weights_location`. Without a `device_map` the model goes to the accelerator, or
    stays on the CPU. With one, layers that are offloaded to the CPU or the disk are not quantised: they are kept in
    `torch_dtype` and loaded to a device for their forward pass. `offload_state_dict` has no effect, because weights are
    never collected in host memory.
    """
    _quantizer(bnb_quantization_config)  # raises for a missing package before anything is changed
    places = get_quantized_model_device_map(
        model, bnb_quantization_config, device_map, max_memory, no_split_module_classes
    )
    for name, _ in (*model.named_parameters(), *model.named_buffers()):
        _place_of(name, places)
    if "disk" in places.values() and offload_folder is None:
        raise ValueError("The device_map puts parts of the model on disk: pass offload_folder=...")
    files = None if weights_location is None else LazyModelFiles(weights_location)
    empty = [name for name, param in model.named_parameters() if param.is_meta]
    if files is None and empty:
        raise ValueError(
            f"{type(model).__name__} has no values for {empty[0]} and {len(empty) - 1} other parameters, because they "
            "are on the meta device. Pass their location: weights_location=..."
        )
    chosen = [name for name in layers_to_convert(model, bnb_quantization_config) if not _is_offloaded(name, places)]
    if not chosen:
        warn(
            f"{type(model).__name__} has no linear layer to quantise: all of its weights stay in "
            f"{bnb_quantization_config.torch_dtype}.",
        )
    _Loader(model, bnb_quantization_config, files, places, chosen).load()
    model.is_loaded_in_8bit = bnb_quantization_config.load_in_8bit  # type: ignore[assignment]
    model.is_loaded_in_4bit = bnb_quantization_config.load_in_4bit  # type: ignore[assignment]
    if len(set(map(str, places.values()))) > 1 or "disk" in places.values():
        from .dispatch import dispatch_model

        return dispatch_model(model, places, offload_dir=offload_folder)
    model.hf_device_map = dict(places)  # type: ignore[assignment]
    return model


def replace_with_bnb_layers(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: Sequence[str] | None = None,
    current_key_name: Sequence[str] | None = None,
) -> nn.Module:
    """Replace linear layers by layers of bitsandbytes. They quantise their weights when moved to a device.

    Without `modules_to_not_convert` the output layer stays. `current_key_name` is the path of this module in a larger
    model, to which names then refer.
    """
    skipped = get_keys_to_not_convert(model) if modules_to_not_convert is None else modules_to_not_convert
    start = ".".join(current_key_name or ())
    for name, layer in _linear_layers(model):
        if not _is_named(f"{start}.{name}" if start else name, skipped):
            new = _empty_bnb_layer(layer, bnb_quantization_config)
            new.weight = _bnb_weight(new, layer.weight.detach(), bnb_quantization_config)
            new.bias = layer.bias
            _set_submodule(model, name, new)
    return model


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Return the names of the modules that stay in 16 bits by default: the last one, and all tied ones.

    A model without a head, whose `base_model_prefix` names no attribute of it, has no such modules.
    """
    tied = [name.rpartition(".")[0] for group in find_tied_parameters(model) for name in group]
    prefix = getattr(model, "base_model_prefix", None)
    has_head = not isinstance(prefix, str) or hasattr(model, prefix)
    last = [name for name, _ in model.named_children()][-1:]
    return list(dict.fromkeys([*tied, *last])) if tied or has_head else []


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Tell whether a model has layers of bitsandbytes with 4-bit weights."""
    if "bitsandbytes" not in sys.modules:  # then there can be none
        return False
    return any(isinstance(module, _bitsandbytes().nn.Linear4bit) for module in model.modules())


def get_parameter_device(parameter: nn.Module) -> torch.device:
    """Return the device of a module's first parameter."""
    return next(parameter.parameters()).device


# --- Which layers, and how large --------------------------------------------------------------------------------------


def quantize_and_offload_8bit(
    model: nn.Module,
    param: Tensor,
    param_name: str,
    new_dtype: torch.dtype | None,
    offload_folder: str | os.PathLike[str],
    offload_index: dict[str, Any],
    fp16_statistics: Tensor | None,
) -> None:
    """Write a weight of an 8-bit layer of bitsandbytes into a folder, with its row scales, and leave none in the model.

    With `fp16_statistics`, the row scales, `param` is quantised already. The scales are named as the weight, with `SCB`
    for `weight`. `set_module_tensor_to_device(..., fp16_statistics=...)` puts both back.
    """
    weight = param if new_dtype is None or not param.is_floating_point() else param.to(new_dtype)
    owner, own = owner_of(model, param_name)
    quantises = fp16_statistics is None and isinstance(getattr(owner, own), _bitsandbytes().nn.Int8Params)
    if quantises:
        quantised = _bitsandbytes().nn.Int8Params(weight.contiguous(), requires_grad=False, has_fp16_weights=False)
        quantised = quantised.to(default_device())
        weight, fp16_statistics = quantised.data, quantised.SCB
    offload_weight(weight, param_name, offload_folder, index=offload_index)
    if fp16_statistics is not None:
        offload_weight(fp16_statistics, param_name.replace("weight", "SCB"), offload_folder, index=offload_index)
    set_module_tensor_to_device(model, param_name, "meta", value=torch.empty(param.shape), dtype=new_dtype)


def layers_to_convert(model: nn.Module, config: BnbQuantizationConfig | None = None) -> dict[str, nn.Linear]:
    """Return the linear layers of a model to quantise, by name; without a config, the default ones."""
    skipped = config.skip_modules if config is not None else None
    skipped = get_keys_to_not_convert(model) if skipped is None else skipped
    in_fp32 = (config.keep_in_fp32_modules if config is not None else None) or []
    return {name: layer for name, layer in _linear_layers(model) if not _is_named(name, [*skipped, *in_fp32])}


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the layers that can be replaced: plain ones whose weights no parent module reads."""
    readers = (nn.MultiheadAttention, nn.TransformerEncoderLayer)  # they pass the weights to a fused kernel
    read = {id(part) for module in model.modules() if isinstance(module, readers) for part in module.modules()}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if name and type(module) is nn.Linear and id(module) not in read:
            yield name, module


def _is_named(name: str, keys: Sequence[str]) -> bool:
    """Tell whether a key is the name of a module or a part of its path."""
    return any(f".{key}." in f".{name}." for key in keys)


def quantized_size(weight: Tensor, bits: int) -> int:
    """Return the bytes of a weight in the formats of bitsandbytes, its scales included."""
    if bits == 8:
        return weight.numel() + _FLOAT_BYTES * weight.shape[0]
    blocks = -(-weight.numel() // _BLOCK_SIZE)
    return -(-weight.numel() // 2) + _FLOAT_BYTES * (blocks + _CODEBOOK_SIZE)


def quantized_model_size(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers, the scales of quantised ones included."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    parts = [part for tensor in tensors.values() for part in _parts(tensor)]
    # The first forward pass of an 8-bit layer moves the scales from its weight to its state.
    scales = (getattr(getattr(module, "state", None), "SCB", None) for module in model.modules())
    parts += [scale for scale in scales if isinstance(scale, Tensor)]
    return sum(part.numel() * part.element_size() for part in {id(part): part for part in parts}.values())


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    if hasattr(tensor, "__tensor_flatten__"):  # torchao's
        yield from (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return
    yield tensor.data
    if isinstance(scales := getattr(tensor, "SCB", None), Tensor):
        yield scales
    state = getattr(tensor, "quant_state", None)
    while state is not None:
        yield from (state.absmax, state.code)
        state = getattr(state, "state2", None)


# --- Loading ----------------------------------------------------------------------------------------------------------


class _Loader:
    """Convert every module of a model, with its tensors on their device and in their dtype.

    It holds names and no modules, so that replaced modules are freed at once.
    """

    def __init__(
        self,
        model: nn.Module,
        config: BnbQuantizationConfig,
        files: LazyModelFiles | None,
        places: Mapping[str, Any],
        chosen: Sequence[str],
    ) -> None:
        self.model = model
        self.config = config
        self.files = files
        self.places = places
        self.chosen = frozenset(chosen)
        self.tied_names = {name: tuple(group) for group in find_tied_tensors(model) for name in group}
        self.computed = get_non_persistent_buffers(model, recurse=True, fqns=True)
        self.placed: dict[tuple[str, ...], Tensor] = {}
        """The converted tensor of each group of tied names."""

    def load(self) -> None:
        """Convert the whole model."""
        self._check_names()
        names: dict[int, list[str]] = {}
        for name, module in self.model.named_modules(remove_duplicate=False):
            names.setdefault(id(module), []).append(name)
        for name, *others in progress(list(names.values()), "Quantising the model", "modules"):
            if name in self.chosen:
                layer = self._quantized(name)
                for place in (name, *others):
                    _set_submodule(self.model, place, layer)
                _trim_heap(layer)
            else:
                self._convert_module(name)

    def _check_names(self) -> None:
        if self.files is None:
            return
        own = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        missing = sorted(name for name in own if self._stored_name(name) is None)
        if missing:
            shown = ", ".join(missing[:4])
            raise ValueError(f"{self.files.path} has no values for {len(missing)} parameters of the model: {shown}.")
        buffers = {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        unknown = sorted(set(self.files.names) - own - buffers)
        if unknown:
            warn(
                f"{self.files.path} has {len(unknown)} tensors that the model does not have: {', '.join(unknown[:4])}.",
            )

    def _stored_name(self, name: str) -> str | None:
        """Return the name under which the files have a tensor, which may be a tied one."""
        if self.files is None:
            return None
        names = self.files.names
        return next((tied_name for tied_name in (name, *self.tied_names.get(name, ())) if tied_name in names), None)

    def _value(self, name: str, old: Tensor) -> Tensor:
        """Return the values of a tensor on its device, not quantised."""
        stored = self._stored_name(name)
        value = self.files.read(stored) if self.files is not None and stored is not None else old.detach()
        if value.is_meta:
            raise ValueError(
                f"{name} is on the meta device, and the files have no values for it. Build the model in "
                "init_empty_weights(), which leaves buffers real."
            )
        if value.shape != old.shape or value.is_floating_point() != old.is_floating_point():
            raise ValueError(
                f"{name} is {value.dtype} of shape {tuple(value.shape)} in the file, and {old.dtype} of shape "
                f"{tuple(old.shape)} in the model. Weights that are quantised already cannot be quantised again."
            )
        place = _place_of(name, self.places)
        return value.to(as_device("cpu" if str(place) == "disk" else place), self._dtype(name, old))

    def _dtype(self, name: str, old: Tensor) -> torch.dtype:
        if not old.is_floating_point() or name in self.computed:
            return old.dtype
        in_fp32 = _is_named(name, self.config.keep_in_fp32_modules or [])
        dtype: torch.dtype = torch.float32 if in_fp32 else self.config.torch_dtype
        return dtype

    def _convert_module(self, path: str) -> None:
        """Convert the direct tensors of a module that is not quantised."""
        module = self.model.get_submodule(path)
        for store in (module._parameters, module._buffers):
            for name, old in list(store.items()):
                if old is not None:
                    store[name] = self._converted(f"{path}.{name}" if path else name, old)  # type: ignore[assignment]

    def _converted(self, name: str, old: Tensor) -> Tensor:
        """Return the converted tensor, the same for all tied names."""
        tied_names = self.tied_names.get(name, (name,))
        if tied_names in self.placed:
            return self.placed[tied_names]
        value = self._value(name, old)
        if isinstance(old, nn.Parameter):
            value = nn.Parameter(value, requires_grad=old.requires_grad)
        if len(tied_names) > 1:
            self.placed[tied_names] = value
        return value

    def _quantized(self, name: str) -> nn.Module:
        layer = self.model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        bias = None if layer.bias is None else self._converted(f"{name}.bias", layer.bias)
        new = _quantizer(self.config)(layer, self._value(f"{name}.weight", layer.weight), self.config)
        new.bias = bias
        return new


def _trim_heap(layer: nn.Module) -> None:
    """Return the heap memory that converting a layer has freed to the system.

    glibc caches freed blocks, and small weights between them cause fragmentation: without this the process grew to
    several times the size of its tensors.
    """
    trim = _malloc_trim()
    if trim is not None and any(param.numel() > _TRIM_THRESHOLD for param in layer.parameters()):
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # another C library, or Windows
        return None
    return found


def _set_submodule(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, last = owner_of(model, name)
    owner._modules[last] = module


# --- Places -----------------------------------------------------------------------------------------------------------


def get_quantized_model_device_map(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    device_map: Mapping[str, Any] | str | None = None,
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return the device map of a model, planned with the sizes after quantisation.

    Without a map all of it goes to the accelerator, or stays on the CPU; "auto", "balanced", "balanced_low_0" and
    "sequential" make a plan within `max_memory`.
    """
    if device_map is None:
        return {"": torch.device(accelerator_type() or "cpu")}
    if isinstance(device_map, Mapping):
        return dict(device_map)
    if device_map not in _AUTOMATIC_MAPS:
        raise ValueError(f"device_map={device_map!r} is unknown: give a dict, or one of {', '.join(_AUTOMATIC_MAPS)}.")
    from .planning.device_map import get_balanced_memory, infer_auto_device_map

    sizes: dict[str, Any] = {"no_split_module_classes": list(no_split_module_classes or ())}
    sizes["dtype"] = bnb_quantization_config.torch_dtype
    chosen = layers_to_convert(model, bnb_quantization_config)
    sizes["special_dtypes"] = {f"{name}.weight": bnb_quantization_config.target_dtype for name in chosen}
    if device_map != "sequential":
        max_memory = get_balanced_memory(model, max_memory, low_zero=device_map == "balanced_low_0", **sizes)
    return dict(infer_auto_device_map(model, max_memory, **sizes))


_AUTOMATIC_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def _place_of(name: str, places: Mapping[str, Any]) -> Any:
    """Return the place of a module or a tensor: that of the longest matching name."""
    around = [key for key in places if not key or f"{name}.".startswith(f"{key}.")]
    if not around:
        raise ValueError(f"The device_map has no device for {name}.")
    return places[max(around, key=len)]


def _is_offloaded(name: str, places: Mapping[str, Any]) -> bool:
    """Tell whether a module is offloaded: to the disk, or to the CPU while others compute on an accelerator."""
    place = str(_place_of(name, places))
    return place == "disk" or (place == "cpu" and any(str(other) not in ("cpu", "disk") for other in places.values()))


# --- Quantisers -------------------------------------------------------------------------------------------------------

_Quantizer = Callable[[nn.Linear, Tensor, BnbQuantizationConfig], nn.Module]


def _quantizer(config: BnbQuantizationConfig) -> _Quantizer:
    """Return the function that creates a quantised layer from a layer and its weight."""
    if config.backend == "torchao":
        _package("torchao.quantization")
        return _quantize_by_torchao
    _bitsandbytes()
    return _quantize_by_bitsandbytes


def _package(name: str) -> Any:
    package = name.partition(".")[0]
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            f"Quantising with {package} needs the package, which cannot be imported here ({error}). "
            f"Install it with: pip install {package}"
        ) from error


def _bitsandbytes() -> Any:
    return _package("bitsandbytes")


def _quantize_by_bitsandbytes(layer: nn.Linear, weight: Tensor, config: BnbQuantizationConfig) -> nn.Module:
    new: nn.Module = _empty_bnb_layer(layer, config)
    new.weight = _bnb_weight(new, weight, config).to(weight.device)
    return new


def _empty_bnb_layer(layer: nn.Linear, config: BnbQuantizationConfig) -> Any:
    layers = _bitsandbytes().nn
    shape = {"input_features": layer.in_features, "output_features": layer.out_features, "bias": layer.bias is not None}
    if config.load_in_8bit:
        new = layers.Linear8bitLt(
            **shape, has_fp16_weights=False, threshold=config.llm_int8_threshold, device=torch.device("meta")
        )
    else:
        new = layers.Linear4bit(
            **shape,
            compute_dtype=config.bnb_4bit_compute_dtype,
            compress_statistics=config.bnb_4bit_use_double_quant,
            quant_type=config.bnb_4bit_quant_type,
            device=torch.device("meta"),
        )
    return new.train(layer.training)


def _bnb_weight(layer: Any, weight: Tensor, config: BnbQuantizationConfig) -> Any:
    """Create the parameter that is quantised when it is moved to a device."""
    params = _bitsandbytes().nn
    if config.load_in_8bit:
        return params.Int8Params(weight.contiguous(), requires_grad=False, has_fp16_weights=False)
    return params.Params4bit(
        weight.contiguous(),
        requires_grad=False,
        compress_statistics=config.bnb_4bit_use_double_quant,
        quant_type=config.bnb_4bit_quant_type,
        module=layer,
    )


def _quantize_by_torchao(layer: nn.Linear, weight: Tensor, config: BnbQuantizationConfig) -> nn.Module:
    quantization = _package("torchao.quantization")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
    return layer
