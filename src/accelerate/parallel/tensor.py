"""Tensor parallelism by a plan: module name patterns -> how a layer is split over the processes of one axis."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from .wrapping import is_called

logger = logging.getLogger(__name__)

_STYLES: dict[str, Any] = {
    "colwise": lambda: ColwiseParallel(),
    "rowwise": lambda: RowwiseParallel(),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "vocab": lambda: ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    "sequence": lambda: SequenceParallel(),
    "sequence_parallel": lambda: SequenceParallel(),
    "sequence_rowwise": lambda: RowwiseParallel(output_layouts=Shard(1)),
    "sequence_input": lambda: PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "sequence_output": lambda: PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
}
"""Styles by name; what each splits is in the documentation of `torch.distributed.tensor.parallel`."""


def split_layers(model: nn.Module, plan: Mapping[str, Any] | None, mesh: DeviceMesh) -> None:
    """Split the layers that the plan names, in place; a model that carries DTensors already is taken as it is."""
    if any(isinstance(param, DTensor) for param in model.parameters()):
        return
    plan = plan or getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not plan:
        raise ValueError(
            f"tp_size={mesh.size()} splits layers by a plan, and neither ParallelismConfig(tp_plan=...) nor the model "
            "has one. A plan names layers and how they are split: "
            '{"blocks.*.attention.query": "colwise", "blocks.*.attention.out": "rowwise"}.'
        )
    _require_divisible_heads(model, mesh.size())
    modules = {name: module for name, module in model.named_modules() if name}
    styles: dict[str, ParallelStyle] = {}
    for pattern, style in plan.items():
        names = [name for name in modules if is_called(name, pattern)]
        if not names:
            logger.warning("The plan of tensor parallelism names %r, and the model has no such module.", pattern)
        for name in names:
            styles[name] = _style(style, pattern)
            _require_divisible(name, modules[name], styles[name], mesh.size())
    if not styles:
        raise ValueError(f"No module of the model has a name in the plan {sorted(plan)}.")
    parallelize_module(model, mesh, styles)
    if any(isinstance(style, ColwiseParallel) and not style.use_local_output for style in styles.values()):
        _let_losses_take_split_vocabularies()


def _style(style: Any, pattern: str) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if style not in _STYLES:
        raise ValueError(
            f"The plan of tensor parallelism gives {pattern!r} the style {style!r}: choose one of "
            f"{', '.join(_STYLES)}, or a ParallelStyle of torch."
        )
    made: ParallelStyle = _STYLES[style]()
    return made


def _require_divisible(name: str, module: nn.Module, style: ParallelStyle, size: int) -> None:
    weight = getattr(module, "weight", None)
    if weight is None or weight.dim() != 2 or not isinstance(style, (ColwiseParallel, RowwiseParallel)):
        return
    is_embedding = isinstance(module, nn.Embedding)
    dim = (0 if isinstance(style, ColwiseParallel) else 1) if not is_embedding else isinstance(style, ColwiseParallel)
    width = weight.shape[int(dim)]
    if width % size:
        raise ValueError(
            f"{name} has {width} {'outputs' if isinstance(style, ColwiseParallel) else 'inputs'}, which tp_size={size} "
            f"does not divide. Sizes that would: {_divisors(width)}."
        )


def _require_divisible_heads(model: nn.Module, size: int) -> None:
    config = getattr(model, "config", None)
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, field, None)
        if isinstance(heads, int) and heads % size:
            raise ValueError(
                f"The model has {field}={heads}, which tp_size={size} does not divide. Sizes that would: "
                f"{_divisors(heads)}."
            )


def _divisors(number: int) -> str:
    found = [n for n in range(1, min(number, 64) + 1) if number % n == 0]
    return ", ".join(map(str, found))


def _let_losses_take_split_vocabularies() -> None:
    """Teach cross entropy to work on logits of which every process has some columns, from now on."""
    from torch.distributed.tensor.parallel import loss_parallel

    global _loss_context
    if _loss_context is None:
        _loss_context = loss_parallel()
        _loss_context.__enter__()


_loss_context: Any = None


def get_model_tp_size(model: nn.Module) -> int | None:
    """Return over how many processes a library has split a model's layers, as it noted in `tp_size`; None without."""
    size = getattr(model, "tp_size", None)
    return None if size is None else int(size)
