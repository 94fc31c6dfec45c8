"""Tensor parallelism by a plan: module name patterns -> how a layer is split over one mesh axis."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from itertools import chain
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

from ....errors import UnsupportedSettingError
from ....runtime.modules import owner_of
from ...modules.materialising import Ties
from ...modules.placeholder import Placeholder
from ...modules.wrapping import is_inside, matches_pattern
from ..context.sequences import require_no_recurrence
from .partial_gradients import Completing, abbreviated, sum_partial_gradients
from .sequences import Layers, split_between_regions
from .transformers_styles import (
    is_split_by_transformers,
    require_known_to_transformers,
    split_by_transformers,
    sum_each_gradient_once,
)

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
"""Styles by name; see `torch.distributed.tensor.parallel` for their meaning."""
_REPLICATED = ("replicate", "replicated_with_grad_allreduce")
"""Styles of layers that are not split; gradients to sum are detected for every layer."""
_PEFT = "base_model.model."
"""What PEFT puts before the names of a model's layers."""
_LORA = ("base_layer", "lora_A", "lora_B", "lora_dropout")


def split_layers(
    model: nn.Module,
    plan: Mapping[str, Any] | None,
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool = False,
    except_for: Collection[str] = (),
) -> None:
    """Split the layers that the plan names, in place.

    Modules with the names `except_for` are spread by other means, and left as they are.
    Tied weights stay tied, and parameters outside the plan get complete gradients: see [Note: partial gradients].
    """
    given, plan = plan, plan or getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not plan:
        raise ValueError(
            f"tp_size={mesh.size()} splits layers by a plan, and neither ParallelismConfig(tp_plan=...) nor the model "
            "has one. A plan names layers and how they are split: "
            '{"blocks.*.attention.query": "colwise", "blocks.*.attention.out": "rowwise"}.'
        )
    _require_divisible_heads(model, mesh.size())
    if any(isinstance(style, SequenceParallel) or str(style).startswith("sequence") for style in plan.values()):
        require_no_recurrence(model, "a plan of tensor parallelism that splits sequences")
    ties = Ties(model)
    layers, rest = _layers_of(model, plan, given, except_for)
    for name, (module, style) in layers.items():
        _require_splittable(name, module, style)
        _require_divisible(name, module, style, mesh.size())
    if not rest:
        _require_matching_ends(layers)
    if sequence_parallel:
        require_no_recurrence(model, "sequence_parallel=True")
        layers = split_between_regions(model, layers, rest, mesh)
    for module, style in layers.values():
        parallelize_module(module, mesh, style)
    completing = split_by_transformers(model, rest, mesh)
    _restore_ties(model, ties, mesh)
    if any(isinstance(style, ColwiseParallel) and not style.use_local_output for _, style in layers.values()):
        _enable_loss_parallel()
    sum_partial_gradients(model, mesh, completing)


def complete_gradients_of_split(model: nn.Module, mesh: DeviceMesh) -> None:
    """Complete the gradients of a model that came split by transformers, or by `parallelize_module`."""
    if is_split_by_transformers(model):
        sum_each_gradient_once(model, mesh)
    else:
        sum_partial_gradients(model, mesh, Completing(), came_split=True)


def _layers_of(
    model: nn.Module, plan: Mapping[str, Any], given: Mapping[str, Any] | None, except_for: Collection[str]
) -> tuple[Layers, dict[str, str]]:
    """Return the layers that torch's styles split, and the rules that only transformers implements, both by name."""
    modules = {name: module for name, module in model.named_modules() if name and not is_inside(name, except_for)}
    params = [name for name, _ in model.named_parameters(remove_duplicate=False) if not is_inside(name, except_for)]
    # The plan of a model class may name layers that this model lacks.
    matching = _matching_rules(plan, [*modules, *params], warns=plan is given)
    # A placeholder belongs to another process of the pipeline.
    own = {name: module for name, module in modules.items() if not isinstance(module, Placeholder)}
    layers: dict[str, tuple[nn.Module, ParallelStyle]] = {}
    rest: dict[str, str] = {}
    for pattern, style in matching.items():
        found = [name for name in [*own, *params] if matches_pattern(_in_base(name), pattern)]
        is_torchs = isinstance(style, ParallelStyle) or style in _STYLES
        if not is_torchs or not own.keys() >= set(found):
            require_known_to_transformers(pattern, style, _STYLES)
            rest |= dict.fromkeys(found, style)
            continue
        parts = chain.from_iterable(_parts_of_adapted(name, own[name], style).items() for name in found)
        layers |= {part: (child, _style(style, child)) for part, child in parts}
    return layers, rest


def _in_base(name: str) -> str:
    """Return the name of a layer in the model that PEFT has wrapped."""
    return name.removeprefix(_PEFT)


def _parts_of_adapted(name: str, layer: nn.Module, style: Any) -> dict[str, nn.Module]:
    """Return the parts of a layer that are split in its style: for one with LoRA, its base layer and an adapter's end.

    Outputs that are split by columns are those of the base layer and of B, which takes the whole outputs of A. Inputs
    that are split are those of the base layer and of A, whose outputs are whole.
    """
    base = getattr(layer, "base_layer", None)
    if not isinstance(base, nn.Module):
        return {name: layer}
    made = _style(style, base)
    if isinstance(made, ColwiseParallel):
        end = "lora_B" if not made.output_layouts[0].is_replicate() else None
    else:
        end = "lora_A" if isinstance(made, RowwiseParallel) and not made.input_layouts[0].is_replicate() else None
    others = [
        child
        for child, part in layer.named_children()
        if child not in _LORA and next(part.parameters(), None) is not None
    ]
    if others or not isinstance(base, nn.Linear) or any(True for _ in layer.parameters(recurse=False)):
        raise UnsupportedSettingError(
            f"a plan of tensor parallelism for {name}, a {type(layer).__name__} of PEFT",
            "only plain LoRA of an nn.Linear is split with its layer"
            + (f", and it has {abbreviated(others)}." if others else "."),
            "Leave the layer out of target_modules or out of the plan, or use plain LoRA (use_dora=False).",
        )
    ends = dict(getattr(layer, end).named_children()) if end is not None else {}
    return {f"{name}.base_layer": base, **{f"{name}.{end}.{adapter}": part for adapter, part in ends.items()}}


def _matching_rules(plan: Mapping[str, Any], names: list[str], *, warns: bool) -> dict[str, Any]:
    """Return the rules of a plan that match one of the names; at least one must."""
    matching = {
        pattern: style
        for pattern, style in plan.items()
        if any(matches_pattern(_in_base(name), pattern) for name in names)
    }
    if warns:
        for pattern in [pattern for pattern in plan if pattern not in matching]:
            logger.warning("The plan of tensor parallelism names %r, and the model has no such module.", pattern)
    if not matching:
        raise ValueError(f"No module of the model has a name in the plan {sorted(plan)}.")
    return {pattern: style for pattern, style in matching.items() if style not in _REPLICATED}


def _style(style: Any, module: nn.Module) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if style == "rowwise" and isinstance(module, nn.Embedding):
        style = "embedding_rowwise"  # its inputs are row indices, which are replicated
    made: ParallelStyle = _STYLES[style]()
    return made


def _require_matching_ends(layers: Mapping[str, tuple[nn.Module, ParallelStyle]]) -> None:
    """Refuse a plan that splits activations and never reduces them, or reduces what is not split."""
    styles = [style for _, style in layers.values()]
    if not all(isinstance(style, (ColwiseParallel, RowwiseParallel)) for style in styles):
        return  # other styles are checked in the first forward pass
    begin = [
        name for name, (_, style) in layers.items() if isinstance(style, ColwiseParallel) and _splits_output(style)
    ]
    end = [name for name, (module, style) in layers.items() if _takes_split_input(module, style)]
    if begin and not end:
        raise ValueError(
            f"The plan of tensor parallelism splits the outputs of {abbreviated(begin)}, and no layer takes them so: "
            'give the layer after each the style "rowwise", or gather the outputs by "colwise_rep".'
        )
    if end and not begin:
        raise ValueError(
            f"The plan of tensor parallelism gives {abbreviated(end)} split inputs, and no layer makes such: give the "
            'layer before each the style "colwise", or take whole inputs by "rowwise_rep".'
        )


def _splits_output(style: ColwiseParallel) -> bool:
    return style.use_local_output and not style.output_layouts[0].is_replicate()


def _takes_split_input(module: nn.Module, style: ParallelStyle) -> bool:
    if not isinstance(style, RowwiseParallel) or isinstance(module, nn.Embedding):
        return False
    return not style.input_layouts[0].is_replicate()


def _require_splittable(name: str, module: nn.Module, style: ParallelStyle) -> None:
    is_split = isinstance(style, (ColwiseParallel, RowwiseParallel))
    if is_split and hasattr(module, "weight") and "weight" not in module._parameters:
        raise UnsupportedSettingError(
            f"a plan of tensor parallelism that splits {name}",
            "its weight is computed from other parameters (weight_norm, spectral_norm or another parametrization).",
            "Leave it out of the plan, with the layer that takes its outputs or gives it inputs; or remove the "
            "parametrization before prepare() (torch.nn.utils.parametrize.remove_parametrizations).",
        )
    if is_split and not isinstance(module, (nn.Linear, nn.Embedding)):
        raise ValueError(
            f"The plan of tensor parallelism splits {name}, which is a {type(module).__name__}: only nn.Linear and "
            "nn.Embedding can be split by columns or rows. Leave it out of the plan, or replace it by an nn.Linear."
        )
    inside = [own for own, child in module.named_children() if next(child.parameters(), None) is not None]
    if isinstance(style, (ColwiseParallel, RowwiseParallel)) and inside:
        raise ValueError(
            f"The plan of tensor parallelism splits {name}, a {type(module).__name__} with weights in modules of its "
            f"own ({', '.join(inside)}), which would compute on a part of its output. Leave it out of the plan."
        )


def _restore_ties(model: nn.Module, ties: Ties, mesh: DeviceMesh) -> None:
    """Tie shared weights again; a layer outside the plan is split like the one it shares with."""
    for names in ties.groups:
        params = {name: model.get_parameter(name) for name in names}
        ways = {param.placements for param in params.values() if isinstance(param, DTensor)}
        if len(ways) > 1:
            each = "; ".join(f"{name} {_described(param)}" for name, param in params.items())
            raise ValueError(
                f"{' and '.join(names)} share one weight, and the plan of tensor parallelism splits it in two ways "
                f"({each}). Give an embedding and its head styles that fit: embedding_rowwise with colwise_rep, "
                "colwise_gather_output or vocab."
            )
        for name, param in params.items():
            if ways and not isinstance(param, DTensor):
                owner, own = owner_of(model, name)
                parallelize_module(owner, mesh, _like(owner, own, next(iter(ways)), names))
    ties.restore(model)


def _like(layer: nn.Module, own: str, placements: tuple[Any, ...], names: list[str]) -> ParallelStyle:
    """Return the style that splits a layer's weight in this way, but neither its inputs nor its outputs."""
    by_rows = placements == (Shard(0),)
    if own == "weight" and (by_rows or placements == (Shard(1),)):
        if isinstance(layer, nn.Embedding):
            return (
                RowwiseParallel(input_layouts=Replicate()) if by_rows else ColwiseParallel(output_layouts=Replicate())
            )
        if isinstance(layer, nn.Linear):
            return (
                ColwiseParallel(output_layouts=Replicate()) if by_rows else RowwiseParallel(input_layouts=Replicate())
            )
    raise ValueError(
        f"{' and '.join(names)} share one parameter, the plan of tensor parallelism splits it, and a "
        f"{type(layer).__name__} cannot compute with a part of it. Leave all of them out of the plan."
    )


def _described(param: nn.Parameter) -> str:
    return f"as {param.placements[0]}" if isinstance(param, DTensor) else "not"


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


def _enable_loss_parallel() -> None:
    """Enable torch's `loss_parallel` for the rest of the process: cross entropy takes sharded logits."""
    from torch.distributed.tensor.parallel import loss_parallel

    global _loss_context
    if _loss_context is None:
        _loss_context = loss_parallel()
        _loss_context.__enter__()


_loss_context: Any = None
