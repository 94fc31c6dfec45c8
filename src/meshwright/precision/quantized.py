"""Frozen quantised weights in models that are trained and sharded.

[Note: quantised shards] `fully_shard` makes plain parameters of what it gathers, so a weight loses what its class kept
beside its values: the scales. `Linear4bit` of bitsandbytes also has them on the layer, and gives them back to a
gathered weight. Its packed bytes are sharded, as long as nothing converts them to another dtype. Weights of all other
quantised classes stay whole on every process: bitsandbytes in 8 bits, and torchao, whose classes cannot be split, or
can (NF4) but do not resume.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import transform_subclass

from ..errors import UnsupportedSettingError
from ..runtime.collectives.operations import mesh_of
from ..runtime.devices.device import finest_reduced_float


def quantized_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that `fully_shard` would take for plain ones, and lose the scales of, by name."""
    return {name: param for name, param in model.named_parameters() if _is_quantized(param)}


def _is_quantized(param: nn.Parameter) -> bool:
    bitsandbytes = sys.modules.get("bitsandbytes")
    if bitsandbytes is not None and isinstance(param, (bitsandbytes.nn.Params4bit, bitsandbytes.nn.Int8Params)):
        return True
    return is_composed(param) and not param.requires_grad  # training in a low precision has classes of its own


def is_composed(tensor: Tensor) -> bool:
    """Return whether a tensor has others inside, as those of torchao have.

    A DTensor is sharded, not composed, and the result of a collective is a plain tensor that is not there yet.
    """
    return hasattr(tensor, "__tensor_flatten__") and mesh_of(tensor) is None and not is_pending(tensor)


def is_pending(tensor: Tensor) -> bool:
    """Return whether a tensor is the result of a collective that nobody has waited for."""
    return hasattr(tensor, "trigger_wait")


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors inside a composed tensor."""
    return [part for _, part in _parts("", tensor)]


def with_parts(tensor: Tensor, replacement: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a composed tensor with other tensors inside."""

    def replaced(_: str, part: Tensor) -> Tensor:
        return with_parts(part, replacement) if is_composed(part) else replacement(part)

    result: Tensor = transform_subclass(tensor, replaced)  # type: ignore[no-untyped-call]
    return result


def _four_bit_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers of bitsandbytes whose weights can be sharded."""
    bitsandbytes = sys.modules.get("bitsandbytes")
    if bitsandbytes is not None:
        for name, module in model.named_modules():
            if isinstance(module, bitsandbytes.nn.Linear4bit):
                yield name, module


def refuse_quantized(model: nn.Module, setting: str, reason: str, remedy: str) -> None:
    """Refuse a setting that would give wrong values to a model with quantised weights."""
    quantized = quantized_parameters(model)
    if quantized:
        name, param = next(iter(quantized.items()))
        kind = f"{type(param).__module__.partition('.')[0]}'s {type(param).__name__}"
        raise UnsupportedSettingError(f"{setting} with quantised weights ({name} is {kind})", reason, remedy)


def refuse_without_values(model: nn.Module) -> None:
    """Refuse quantised weights on the meta device: nobody hands out their scales."""
    if any(param.is_meta for param in model.parameters()):
        refuse_quantized(
            model,
            "parameters on the meta device",
            "neither an initialisation nor cpu_ram_efficient_loading gives a quantised weight its scales.",
            "Load and quantise the model on every process.",
        )


def ready_to_shard(model: nn.Module, param_dtype: torch.dtype | None, device: torch.device) -> None:
    """Make 4-bit weights ready for `fully_shard`, and move the quantised weights that stay whole to the device.

    `param_dtype` is the dtype to which FSDP2 converts parameters when it gathers them. Packed bytes that are stored in
    another floating-point dtype would be converted like numbers: they are stored as bytes instead.
    """
    for _, layer in _four_bit_layers(model):
        if _is_quantized(layer.weight):
            _ready(layer, param_dtype, device)
    whole = set(whole_weights(model))
    for module in model.modules():
        if not whole.isdisjoint(module._parameters.values()):
            module._apply(lambda tensor: tensor.to(device), recurse=False)  # type: ignore[no-untyped-call]


def whole_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the quantised weights that are not sharded; see [Note: quantised shards]."""
    sharded = {layer.weight for _, layer in _four_bit_layers(model)}
    return [param for param in quantized_parameters(model).values() if param not in sharded]


def _ready(layer: Any, param_dtype: torch.dtype | None, device: torch.device) -> None:
    weight = layer.weight
    if not weight.bnb_quantized:  # it does that on its first move to a device
        layer.weight = weight = weight.to(device)
    # A CPU with AVX512-BF16 repacks weights in an evaluation, and saving unpacks them. Gathered ones are not repacked.
    layer.state_dict()
    layer.support_avx512bf16_for_cpu = False
    layer.quant_state = weight.quant_state
    if weight.dtype.is_floating_point and param_dtype not in (None, weight.dtype):
        weight.data = weight.data.reshape(-1).view(torch.uint8).reshape(-1, 1)
        weight.quant_storage = layer.quant_storage = torch.uint8


def keep_scales(model: nn.Module, device: torch.device) -> None:
    """Give sharded 4-bit weights their scales, which state dicts take from there; refuse weights that lost theirs."""
    for name, layer in _four_bit_layers(model):
        if mesh_of(layer.weight) is None:
            continue
        state = getattr(layer, "quant_state", None)
        if state is None or state.absmax.is_meta:
            raise ValueError(
                f"{name}.weight is sharded and has no scales: all outputs of this layer would be wrong. Quantise the "
                "model before it is sharded, on every process: accelerator.prepare() shards it."
            )
        state.to(device)
        packed = layer.weight.numel() * layer.weight.element_size()
        if packed != -(-state.shape.numel() // 2):
            raise ValueError(
                f"{name}.weight has {packed} bytes for {state.shape.numel()} numbers of 4 bits: it was converted to "
                f"{layer.weight.dtype} after it was quantised. Quantise it as the last step, and set its storage by "
                "bnb_4bit_quant_storage."
            )
        _attach(layer.weight, state)


def _attach(weight: Any, state: Any) -> None:
    """Put scales on a weight, where bitsandbytes looks for them when it saves, and torch for each of their names."""
    weight.quant_state = state
    if mesh_of(weight) is not None:
        for name, part in state.as_dict(packed=True).items():
            if "." not in name:
                setattr(weight, name, part)


def require_equal_scales(model: nn.Module, group: Any, device: torch.device) -> None:
    """Refuse a model whose scales differ between processes: each would see other weights. Collective."""
    finest = finest_reduced_float(device)
    sums = {name: sum(scale.to(finest).sum() for scale in _scales(param)) for name, param in _with_scales(model)}
    if not sums:
        return
    own = torch.stack([torch.as_tensor(value, dtype=finest, device=device) for value in sums.values()])
    extremes = torch.cat([own, -own])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    most, least = extremes.chunk(2)
    for name, differs in zip(sums, (most != -least).tolist(), strict=True):
        if differs:
            raise ValueError(
                f"{name} is quantised from other values on other processes: their scales differ. Load the same "
                "weights on every process before they are quantised, or call set_seed() before the model is made."
            )


def _with_scales(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, param in model.named_parameters():
        if _is_quantized(param) or getattr(param, "quant_state", None) is not None:
            yield name, param


def _scales(param: Any) -> Iterator[Tensor]:
    """Yield the scales of a weight. Those of 8-bit layers move away in their first forward pass."""
    if is_composed(param):
        yield from (tensor for _, tensor in _parts("", param) if tensor.is_floating_point())
    if isinstance(scales := getattr(param, "SCB", None), Tensor):
        yield scales
    state = getattr(param, "quant_state", None)
    while state is not None:
        yield state.absmax
        state = getattr(state, "state2", None)


# --- State dicts ------------------------------------------------------------------------------------------------------


def save_and_load_quantized(model: nn.Module) -> None:
    """Let quantised layers save what files can hold, and load what they save.

    bitsandbytes writes the scales of 4-bit layers into state dicts, and takes none from there. A weight of torchao is a
    tensor with others inside, which are saved under names of their own: `weight.qdata`, `weight.scale`.
    """
    for _, layer in _four_bit_layers(model):
        _hook(layer, _take_scales)
    for module in model.modules():
        if _composed_weights(module):
            _hook(module, _take_parts)
            if _give_parts not in module._state_dict_hooks.values():
                module.register_state_dict_post_hook(_give_parts)  # type: ignore[no-untyped-call]


def _hook(module: nn.Module, hook: Callable[..., None]) -> None:
    if not any(getattr(known, "hook", known) is hook for known in module._load_state_dict_pre_hooks.values()):
        module.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]


def _composed_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    own = {name: param for name, param in module._parameters.items() if param is not None}
    return {name: param for name, param in own.items() if is_composed(param) and not param.requires_grad}


def _give_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, param in _composed_weights(module).items():
        if state_dict.pop(prefix + name, None) is not None:
            state_dict.update(_parts(prefix + name, param.detach()))


@torch.no_grad()
def _take_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, param in _composed_weights(module).items():
        parts = dict(_parts(prefix + name, param.detach()))
        if parts.keys() <= state_dict.keys():
            for path, part in parts.items():
                part.copy_(state_dict.pop(path))
            state_dict[prefix + name] = param


def _parts(path: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors inside a tensor, by their paths."""
    if not is_composed(tensor):
        yield path, tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from _parts(f"{path}.{name}", getattr(tensor, name))


def _take_scales(layer: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    start = f"{prefix}weight."
    parts = {name.removeprefix(start): state_dict.pop(name) for name in list(state_dict) if name.startswith(start)}
    if parts and getattr(layer, "quant_state", None) is not None:
        state = type(layer.quant_state).from_dict(parts, device=layer.quant_state.absmax.device)
        layer.quant_state = state
        _attach(layer.weight, state)
