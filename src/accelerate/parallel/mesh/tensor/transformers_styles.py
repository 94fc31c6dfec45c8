"""Tensor-parallel styles that only transformers implements: expert parameters, packed weights."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...modules.wrapping import matches_pattern
from .partial_gradients import Completing, sum_gradient_of

_SUPPORTED = (
    "colwise",
    "rowwise",
    "packed_colwise",
    "packed_rowwise",
    "moe_tp_experts",
    "moe_identity_expert",
    "mla_kv_a_proj",
    "all_reduce",
    "embedding_colwise",
)
"""Its styles that split layers over one axis with correct gradients."""


def require_known_to_transformers(pattern: str, style: Any, ours: Iterable[str]) -> None:
    """Refuse a style that neither torch nor transformers has."""
    if style in _SUPPORTED and _engine() is not None:
        return
    raise ValueError(
        f"The plan of tensor parallelism gives {pattern!r} the style {style!r}: choose one of {', '.join(ours)}, or a "
        f"ParallelStyle of torch. Models of transformers 5 can also have {', '.join(_SUPPORTED[2:])}, and styles of "
        "single parameters."
    )


def split_by_transformers(model: nn.Module, rules: Mapping[str, str], mesh: DeviceMesh) -> Completing:
    """Apply the rules that only transformers implements; return the modules that reduce gradients themselves."""
    if not rules:
        return Completing()
    _engine().apply_tensor_parallelism(model, mesh, dict(rules))
    for name, param in model.named_parameters():
        for placement in param.placements if isinstance(param, DTensor) else ():
            parts = mesh.size() * getattr(placement, "split_factor", 1)
            if hasattr(placement, "dim") and param.shape[placement.dim] % parts:
                raise ValueError(
                    f"{name} has {param.shape[placement.dim]} rows or columns to split, no multiple of {parts}: "
                    f"tp_size={mesh.size()} does not fit."
                )

    def split_by(wanted: str) -> list[nn.Module]:
        patterns = [pattern for pattern, style in rules.items() if style == wanted]
        return [module for name, module in model.named_modules() if any(matches_pattern(name, p) for p in patterns)]

    return Completing(inputs=split_by("moe_tp_experts"), outputs=split_by("mla_kv_a_proj"))


def is_split_by_transformers(model: nn.Module) -> bool:
    """Return whether transformers has split a model while it loaded it."""
    return any(getattr(module, "_is_hooked", False) for module in model.modules())


def sum_each_gradient_once(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replace the hooks by which transformers sums the partial gradients of layers that it does not split.

    They sum `param.grad` after every backward pass, and so what was accumulated before once more. They are registered
    in the first forward pass that trains.
    """
    for module in model.modules():
        if _sums_gradients(module.forward):
            _replace_hooks(module, mesh)


def _replace_hooks(module: nn.Module, mesh: DeviceMesh) -> None:
    replaced: set[nn.Parameter] = set()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def replace(*_: Any) -> None:
        own: list[Any] = list(module.parameters(recurse=False))
        for param in own:
            hooks = param._post_accumulate_grad_hooks or {}
            for key in [key for key, hook in hooks.items() if _sums_gradients(hook)]:
                del hooks[key]
                sum_gradient_of(param, mesh)
                replaced.add(param)
        if replaced.issuperset(own):
            handle.remove()

    handle = module.register_forward_hook(replace)


def _sums_gradients(function: Any) -> bool:
    return getattr(function, "__qualname__", "").startswith("ReplicatedWithGradAllReduce.")


def _engine() -> Any:
    if "transformers" not in sys.modules:
        return None
    try:
        from transformers.distributed import tensor_parallel
    except ImportError:  # transformers 4, whose styles are others
        return None
    return tensor_parallel
