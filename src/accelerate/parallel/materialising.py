"""Give weights to a model that was made without them, once it is sharded: no process ever holds all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from ..runtime.modules import names_in_common, owner_of


class Ties:
    """Which names stand for one and the same parameter."""

    def __init__(self, model: nn.Module) -> None:
        self.groups = names_in_common(model.named_parameters(remove_duplicate=False))

    def restore(self, model: nn.Module) -> None:
        """Make them one again, after every module was given a parameter of its own."""
        for first, *others in self.groups:
            param = model.get_parameter(first)
            for name in others:
                setattr(*owner_of(model, name), param)


def has_no_weights(model: nn.Module) -> bool:
    """Tell whether a model was made on the meta device."""
    return any(param.is_meta for param in model.parameters())


def initialise(module: nn.Module, device: torch.device, initialise_one: Callable[[nn.Module], None] | None) -> None:
    """Give the meta parameters directly in a unit memory and first values, and rank 0's values to every process.

    Called for one unit after the other, before it is sharded, so that one unit at a time is whole.
    """
    owners = [child for child in module.modules() if any(p.is_meta for p in _own_tensors(child))]
    for child in owners:
        child.to_empty(device=device, recurse=False)
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
        for tensor in _own_tensors(child):
            dist.broadcast(tensor.detach(), src=0)


def _own_tensors(module: nn.Module) -> Iterable[Tensor]:
    everything: Iterable[Tensor | None] = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in everything if tensor is not None]


def to_meta(model: nn.Module) -> dict[str, Any]:
    """Take all weights out of a model, and return its state on the first process; buffers stay where they are."""
    state = model.state_dict() if dist.get_rank() == 0 else {}
    ties = Ties(model)
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
    ties.restore(model)
    return state


def load_from_first(model: nn.Module, state: dict[str, Any], device: torch.device, *, offload: bool) -> None:
    """Give every process its shards of the state that the first one has."""
    ties = Ties(model)
    buffers = dict(model.named_buffers())
    model.to_empty(device=torch.device("cpu") if offload else device)
    for name, buffer in buffers.items():
        if not buffer.is_meta:
            owner, own = owner_of(model, name)
            owner._buffers[own] = buffer.to(device)
    ties.restore(model)
    set_model_state_dict(
        model,
        state,
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=offload),
    )
