"""Tensor-parallel styles that only transformers implements: expert parameters, packed weights."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

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
    "local_params",
)
"""Its styles that split layers over one axis with correct gradients."""


def require_known_to_transformers(pattern: str, style: Any, ours: Iterable[str]) -> None:
    """Refuse a style that neither torch nor the installed transformers has."""
    if style in _SUPPORTED and style in _styles():
        return
    raise ValueError(
        f"The plan of tensor parallelism gives {pattern!r} the style {style!r}: choose one of {', '.join(ours)}, or a "
        f"ParallelStyle of torch. Models of transformers 5 can also have {', '.join(_SUPPORTED[2:])}, as far as the "
        "installed version has them, and styles of single parameters. ParallelismConfig(tp_plan=...) replaces the "
        "plan of a model."
    )


def split_by_transformers(model: nn.Module, rules: Mapping[str, str], mesh: DeviceMesh) -> Completing:
    """Apply the rules that only transformers implements; return the modules that reduce gradients themselves.

    Rules are by the name of a module or of a parameter; a parameter without one has that of its module. The styles are
    called one by one: the function of transformers that applies a whole plan takes patterns or names, by version.
    """
    if not rules:
        return Completing()
    styles = _styles()
    for name, _ in list(model.named_parameters(remove_duplicate=False)):
        path, _, own = name.rpartition(".")
        if name in rules and path not in rules:
            raise ValueError(
                f"The plan of tensor parallelism splits {name}, and {path or 'the model itself'} has no style by which "
                f'it computes with a part. Leave {own} out of the plan, or add "local_params" for the module '
                "(transformers 5.23)."
            )
        if style := rules.get(name) or rules.get(path):
            styles[style].shard_param(model.get_submodule(path), own, mesh)
    _require_equal_parts(model, mesh)
    split = {name: module for name, module in model.named_modules() if name in rules}
    for name, module in split.items():
        if rules[name] == "moe_tp_experts":
            _require_whole_gates(name, module, mesh)
        if rules[name] == "mla_kv_a_proj":
            module.config = _config_around(model, name)  # says which columns are not split
        styles[rules[name]].install_forward(module, mesh)

    def split_by(wanted: str) -> list[nn.Module]:
        return [module for name, module in split.items() if rules[name] == wanted]

    return Completing(inputs=split_by("moe_tp_experts"), outputs=split_by("mla_kv_a_proj"))


def _require_equal_parts(model: nn.Module, mesh: DeviceMesh) -> None:
    for name, param in model.named_parameters():
        for placement in param.placements if isinstance(param, DTensor) else ():
            parts = mesh.size() * getattr(placement, "split_factor", 1)
            if hasattr(placement, "dim") and param.shape[placement.dim] % parts:
                raise ValueError(
                    f"{name} has {param.shape[placement.dim]} rows or columns to split, no multiple of {parts}: "
                    f"tp_size={mesh.size()} does not fit."
                )


def _require_whole_gates(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse a plan by which the gate of experts would combine other columns than on one process.

    Columns of `gate_up_proj` lie in pairs or in halves: a style fits one of them, and some plans have the other.
    """
    gate: Any = getattr(module, "_apply_gate", None)
    fused: Any = module._parameters.get("gate_up_proj")
    if gate is None or not isinstance(fused, DTensor):
        return
    split: Any = fused.placements[0]
    width = fused.shape[split.dim]
    shape = [width if dim == split.dim % fused.dim() else 1 for dim in range(fused.dim())]
    numbers = distribute_tensor(torch.arange(width).view(shape), mesh, fused.placements, src_data_rank=None)
    columns = torch.linspace(-2, 2, width, device="cpu" if fused.is_meta else fused.device)[None]
    wanted = gate(columns).chunk(mesh.size(), -1)[mesh.get_local_rank()]
    if not torch.allclose(gate(columns[:, numbers.to_local().flatten().tolist()]), wanted):
        raise ValueError(
            f"The plan of tensor parallelism splits {name}.gate_up_proj so that a process would multiply gates of some "
            'columns with the values of others. Columns that lie in halves take the style "packed_colwise", those in '
            'pairs "colwise": ParallelismConfig(tp_plan=...) replaces the plan of a model.'
        )


def _config_around(model: nn.Module, name: str) -> Any:
    """Return the config of the innermost module around a layer that has one: that of its attention."""
    while name:
        name = name.rpartition(".")[0]
        config = getattr(model.get_submodule(name), "config", None)
        if config is not None:
            return config
    raise ValueError(f"No module around a layer of the style 'mla_kv_a_proj' has a config: {type(model).__name__}.")


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


def _styles() -> Mapping[str, Any]:
    """Return the styles of the installed transformers."""
    if "transformers" not in sys.modules:
        return {}
    try:
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
    except ImportError:  # transformers 4, whose styles are others
        return {}
    styles: Mapping[str, Any] = ALL_PARALLEL_STYLES
    return styles
