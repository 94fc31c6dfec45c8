"""The names of a checkpoint: what each tensor is called where a model is saved, and what it is made from.

transformers 5 computes with modules that differ from its checkpoints: it fuses experts, splits projections and renames
prefixes while it loads a model, and does the reverse when it saves one. Here that reverse is cut into `Unit`s, each of
which needs a few tensors only, so that a model is renamed while it streams. Other models keep their names.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import UnsupportedSettingError
from ..parallel.modules.spread import fsdp_modules

Convert = Callable[[Sequence[Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class Unit:
    """Tensors of a checkpoint that are made together."""

    members: tuple[str, ...]
    """The names of the tensors of the model that they are made from."""
    convert: Convert
    """Make the tensors of the checkpoint, by name, in order."""


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether a model is one of transformers, without importing it."""
    base = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    return base is not None and isinstance(model, base)


def without_ignored(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return the names without those that the model does not save."""
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return [name for name in names if name not in ignored]


def without_ties(model: nn.Module, names: Sequence[str], groups: Iterable[Sequence[str]]) -> list[str]:
    """Keep one name of each tied weight: the one from which the model is loaded."""
    declared = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    present = set(names)
    dropped: set[str] = set()
    for group in groups:
        found = [name for name in group if name in present]
        if len(found) > 1:
            dropped |= set(found) - {_main_name(model, found, list(declared))}
    return [name for name in names if name not in dropped]


def _main_name(model: nn.Module, tied: list[str], declared: list[str]) -> str:
    """Return the one of tied names that is not declared to be tied to another."""
    others = sorted(name for name in tied if any(re.search(pattern, name) for pattern in declared))
    main = [name for name in tied if name not in others] or others[-1:]
    if len(main) > 1 and is_of_transformers(model):
        raise UnsupportedSettingError(
            f"accelerator.weights() with {' and '.join(main)}, which share one tensor",
            f"{type(model).__name__} does not tie them when it is loaded: all but one would be random there.",
            "Untie them: give each a tensor of its own.",
        )
    return main[0]


def units_of(model: nn.Module, names: Sequence[str]) -> list[Unit]:
    """Return what makes the checkpoint of a model with tensors of these names."""
    if not is_of_transformers(model):
        return [Unit((name,), renamed(name)) for name in names]
    plain = _as_made(model) if fsdp_modules(model) else model
    conversions = _conversions(plain)
    if not conversions:
        return [Unit((name,), renamed(name)) for name in names]
    units = _reversed(plain, names, conversions)
    places = {name: place for place, name in enumerate(names)}
    units.sort(key=lambda unit: min(places[name] for name in unit.members))
    return units


def _as_made(module: nn.Module) -> nn.Module:
    """Return a view of a model with the classes that `fully_shard` has replaced, by which transformers finds names."""
    kind: Any = type(module)
    if fsdp_modules(module)[:1] == [module]:
        kind = kind.__bases__[-1]
    view: nn.Module = kind.__new__(kind)
    view.__dict__.update(vars(module))
    view.__dict__["_modules"] = {
        name: child if child is None else _as_made(child) for name, child in module._modules.items()
    }
    return view


def _reversed(model: nn.Module, names: Sequence[str], conversions: list[Any]) -> list[Unit]:
    """Return the units that undo the conversions by which transformers loads a model."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, apply_converters, apply_renamings

    reverse = [conversion.reverse_transform() for conversion in conversions[::-1]]
    renamings = [each for each in reverse if isinstance(each, WeightRenaming)]
    converters = [each for each in reverse if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    joined: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    for name in sorted(names, key=natural):  # the order in which parts of one tensor are put together
        target, pattern = apply_converters(name, converters)
        if pattern is None:
            joined[f"\0{name}"] = None, [(apply_renamings(name, renamings), name)]
        else:
            joined.setdefault(target, (by_pattern[pattern], []))[1].append((pattern, name))
    units = []
    for target, (converter, sources) in joined.items():
        members = tuple(name for _, name in sources)
        if converter is None:
            units.append(Unit(members, renamed(sources[0][0])))
        else:
            units.append(Unit(members, _converted(model, target, converter, sources, renamings)))
    return units


def natural(name: str) -> list[tuple[int, int | str]]:
    """Return a key that sorts numbers in names by value."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]


def _conversions(model: Any) -> list[Any]:
    """Return how transformers has changed the tensors of a checkpoint, or would: nothing before its version 5."""
    found = getattr(model, "_weight_conversions", None)
    if found is not None:
        return list(found)
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange
    except ImportError:
        return []
    # Without those for old checkpoints; and a model that was not loaded has no prefix to give back.
    return [
        each for each in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(each, PrefixChange)
    ]


def renamed(name: str) -> Convert:
    """Return what gives a tensor a name, and leaves it as it is."""
    return lambda tensors: {name: tensors[0]}


def _converted(
    model: Any, target: str, converter: Any, sources: Sequence[tuple[str, str]], renamings: list[Any]
) -> Convert:
    """Return what one converter of transformers makes, under the names in the checkpoint."""
    from transformers.core_model_loading import apply_renamings

    def convert(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        one = deepcopy(converter)  # it collects tensors
        for (pattern, name), tensor in zip(sources, tensors, strict=True):
            one.add_tensor(target, name, pattern, tensor)
        made: Mapping[str, Any] = one.convert(target, model=model, config=model.config)
        return {
            apply_renamings(name, renamings): value[0] if isinstance(value, list) else value
            for name, value in made.items()
        }

    return convert


def layer_of(name: str) -> tuple[str, int] | None:
    """Return the stack and the number of the layer that a tensor belongs to: by the first number in its name."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[:place]), int(part)
    return None


def grouped_by_layer(firsts: Sequence[str]) -> list[list[int]]:
    """Return indices in groups: what comes before all layers, each layer of each stack in order, and the rest."""
    layers = [layer_of(name) for name in firsts]
    first = next((index for index, layer in enumerate(layers) if layer is not None), len(layers))
    stacks: dict[str, dict[int, list[int]]] = {}
    for index, layer in enumerate(layers):
        if layer is not None:
            stacks.setdefault(layer[0], {}).setdefault(layer[1], []).append(index)
    groups = [[index for index in range(first) if layers[index] is None]]
    groups += [stack[number] for stack in stacks.values() for number in sorted(stack)]
    groups.append([index for index in range(first, len(layers)) if layers[index] is None])
    return [group for group in groups if group]
