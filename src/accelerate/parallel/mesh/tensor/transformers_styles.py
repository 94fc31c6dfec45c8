"""Tensor-parallel styles that only transformers implements: expert parameters, packed weights."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...modules.wrapping import matches_pattern
from .partial_gradients import Completing

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


def _engine() -> Any:
    if "transformers" not in sys.modules:
        return None
    try:
        from transformers.distributed import tensor_parallel
    except ImportError:  # transformers 4, whose styles are others
        return None
    return tensor_parallel
