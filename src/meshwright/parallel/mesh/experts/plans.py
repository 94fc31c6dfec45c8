"""Find the modules that hold experts, and refuse those that cannot be spread."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from ....errors import UnsupportedSettingError
from ....runtime.modules import tied_names
from ...modules.dtensors import any_dtensor
from ...modules.wrapping import matches_pattern

_STYLES = ("experts", "ep_dispatch_experts")
"""Styles of modules in a plan: ours, and the name that transformers has for the same."""
_OWN_SLICES = "grouped_gemm"
"""The style that transformers gives to parameters with one slice per expert."""

Experts = dict[str, nn.Module]
"""Modules that hold experts, by name."""


def experts_of(model: nn.Module, plan: Mapping[str, str] | None, ep_size: int) -> Experts:
    """Return the modules with experts that the plan names, or else the model's own plan."""
    found = _by_own_plan(model) if plan is None else _by_plan(model, plan)
    if not found:
        raise UnsupportedSettingError(
            f"ep_size={ep_size} with {type(model).__name__}",
            "no module with experts was found: the model has no plan of expert parallelism (ep_plan of transformers)."
            if plan is None
            else f"no module of the model has a name in the plan {sorted(plan)}.",
            'Name them by ParallelismConfig(ep_plan={"layers.*.mlp.experts": "experts"}).',
        )
    shared = {name for names in tied_names(model.named_parameters(remove_duplicate=False)) for name in names}
    for name, module in found.items():
        _require_spreadable(name, module, ep_size, shared)
    return {name: module for name, module in found.items() if not any_dtensor(module.parameters())}


def _by_plan(model: nn.Module, plan: Mapping[str, str]) -> Experts:
    for pattern, style in plan.items():
        if style not in (*_STYLES, _OWN_SLICES):
            raise ValueError(
                f"ParallelismConfig(ep_plan=...) gives {pattern!r} the style {style!r}: the one style of a module with "
                f"experts is {_STYLES[0]!r}."
            )
    patterns = [pattern for pattern, style in plan.items() if style in _STYLES]
    return {name: module for name, module in model.named_modules() if any(matches_pattern(name, p) for p in patterns)}


def _by_own_plan(model: nn.Module) -> Experts:
    plan: Mapping[str, Any] = getattr(model, "_ep_plan", None) or {}
    patterns = [pattern for pattern, style in plan.items() if style == _OWN_SLICES]
    owners = {
        name.rpartition(".")[0]
        for name, _ in model.named_parameters()
        if any(matches_pattern(name, pattern) for pattern in patterns)
    }
    return {name: module for name, module in model.named_modules() if name in owners}


def num_experts_of(module: nn.Module) -> int:
    """Return the number of experts: the leading dimension of the parameters."""
    param = next(module.parameters())
    return param.shape[0] if param.dim() else 0


def _require_spreadable(name: str, module: nn.Module, ep_size: int, shared: Collection[str]) -> None:
    """Refuse a module whose tensors do not have one slice per expert, or that `ep_size` does not divide."""
    params = dict(module.named_parameters())
    if not params:
        raise _refusal(name, module, "it has no parameters.")
    count = num_experts_of(module)
    declared = getattr(module, "num_experts", count)
    for own, param in params.items():
        if f"{name}.{own}" in shared:
            raise _refusal(name, module, f"its {own} is shared with another module.")
        if not param.dim() or param.shape[0] != declared:
            raise _refusal(
                name, module, f"its {own} of {tuple(param.shape)} has no leading dimension of {declared} experts."
            )
    for own, buffer in module.named_buffers():
        if buffer.dim() and buffer.shape[0] == count:
            raise _refusal(name, module, f"its buffer {own} has a slice per expert, and only parameters are spread.")
    if count % ep_size:
        fit = ", ".join(str(size) for size in range(1, count + 1) if count % size == 0)
        raise ValueError(f"{name} has {count} experts, which ep_size={ep_size} does not divide. Sizes that do: {fit}.")


def _refusal(name: str, module: nn.Module, reason: str) -> UnsupportedSettingError:
    return UnsupportedSettingError(
        f"ep_size > 1 with {name or 'the model itself'}, a {type(module).__name__},",
        reason,
        "A module with experts holds each weight of all its experts in one parameter of (experts, ...).",
    )
