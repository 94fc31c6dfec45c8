"""Materialise models made on the meta device while they are sharded, so that no process holds all weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...runtime.collectives.operations import sendable
from ...runtime.modules import owner_of, tied_names
from .dtensors import distribute_like, local


class Ties:
    """The groups of names that share one parameter."""

    def __init__(self, model: nn.Module) -> None:
        self.groups = tied_names(model.named_parameters(remove_duplicate=False))

    def restore(self, model: nn.Module) -> None:
        """Tie the parameters again after every module got its own."""
        for first, *others in self.groups:
            param = model.get_parameter(first)
            for name in others:
                setattr(*owner_of(model, name), param)


def has_no_weights(model: nn.Module) -> bool:
    """Return whether any parameter is on the meta device."""
    return any(param.is_meta for param in model.parameters())


def initialise(module: nn.Module, device: torch.device, initialise_one: Callable[[nn.Module], None] | None) -> None:
    """Allocate and initialise the meta tensors of a unit, and broadcast them from rank 0.

    Call it for each unit right before it is sharded, so that only one unit at a time is unsharded.
    """
    owners = [child for child in module.modules() if any(p.is_meta for p in _own_tensors(child))]
    for child in owners:
        child._apply(lambda tensor: _unset(tensor, device) if tensor.is_meta else tensor.to(device), recurse=False)  # type: ignore[no-untyped-call]
        if initialise_one is not None:
            initialise_one(child)
            continue
        reset = getattr(child, "reset_parameters", None) or getattr(child, "_reset_parameters", None)
        if reset is None:
            raise ValueError(
                f"A {type(child).__name__} was made on the meta device and has no reset_parameters(): its weights "
                "would be arbitrary. Give the class that method, or the plugin a param_init_fn, or load the weights "
                "on the first process (cpu_ram_efficient_loading=True)."
            )
        reset()
    for child in owners:
        for name, tensor in [*child._parameters.items(), *child._buffers.items()]:
            if tensor is not None and _is_unset(tensor.detach()):
                how = "reset_parameters()" if initialise_one is None else "the param_init_fn"
                raise ValueError(
                    f"A {type(child).__name__} was made on the meta device, and {how} gave no value to its {name}. Let "
                    "it, or load the weights on the first process (cpu_ram_efficient_loading=True)."
                )
    for child in owners:
        for tensor in _own_tensors(child):
            dist.broadcast(sendable(tensor.detach()), src=0)


def _unset(tensor: Tensor, device: torch.device) -> Tensor:
    """Allocate a tensor, filled with a sentinel that no initialisation uses."""
    empty = torch.empty_like(tensor, device=device)
    mark = _sentinel(tensor.dtype)
    return empty if mark is None else empty.fill_(mark)


def _is_unset(tensor: Tensor) -> bool:
    mark = _sentinel(tensor.dtype)
    if mark is None or tensor.numel() == 0:
        return False
    return bool((tensor.isnan() if math.isnan(mark) else tensor == mark).all())


def _sentinel(dtype: torch.dtype) -> float | None:
    if dtype.is_floating_point:
        return math.nan if dtype.itemsize > 1 else None
    return None if dtype.is_complex or dtype == torch.bool else torch.iinfo(dtype).min


def _own_tensors(module: nn.Module) -> Iterable[Tensor]:
    everything: Iterable[Tensor | None] = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in everything if tensor is not None]


def to_meta(model: nn.Module) -> dict[str, Any]:
    """Move all parameters to the meta device, and return the state that rank 0 held. Buffers are not moved."""
    held = {**dict(model.named_buffers(remove_duplicate=False)), **model.state_dict()} if dist.get_rank() == 0 else {}
    ties = Ties(model)
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
    ties.restore(model)
    return held


@torch.no_grad()
def load_from_rank_zero(model: nn.Module, held: dict[str, Any], device: torch.device, *, offload: bool) -> None:
    """Distribute the parameters and buffers that rank 0 holds to all processes.

    This includes non-persistent buffers, which nothing else would fill after a model was made on the meta device.
    """
    ties = Ties(model)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    model.to_empty(device=torch.device("cpu") if offload else device)
    empty = {id(buffer): torch.empty_like(buffer, device=device) for buffer in buffers.values()}
    for name, buffer in buffers.items():
        owner, own = owner_of(model, name)
        owner._buffers[own] = empty[id(buffer)]
    ties.restore(model)
    targets = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    forms = {name: (tensor.shape, tensor.dtype) for name, tensor in targets.items()}
    extra = {name: value for name, value in held.items() if not isinstance(value, Tensor)}
    payload = [forms, extra]
    dist.broadcast_object_list(payload, src=0, device=device)
    [first_forms, extra] = payload
    objections: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(objections, None if forms == first_forms else _difference(forms, first_forms))
    if any(objections):
        raise ValueError(next(filter(None, objections)))
    for name, target in targets.items():
        value = held[name].to(device) if held else torch.empty(target.shape, dtype=target.dtype, device=device)
        dist.broadcast(sendable(value), src=0)
        local(target).copy_(local(distribute_like(value, target)))
    if extra:
        model.load_state_dict(extra, strict=False)


def _difference(own: dict[str, Any], first: dict[str, Any]) -> str:
    name = next(name for name in {**first, **own} if own.get(name) != first.get(name))

    def described(form: Any) -> str:
        return "missing" if form is None else f"{tuple(form[0])} of {form[1]}"

    return (
        "cpu_ram_efficient_loading gives every process what the model holds on process 0, and on process "
        f"{dist.get_rank()} it is another model: {name} is {described(own.get(name))}, and on process 0 "
        f"{described(first.get(name))}. Make the same model on every process, with the same weights tied."
    )
