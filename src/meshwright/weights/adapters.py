"""LoRA of PEFT: adapters merged into the weights that are handed over, or the tensors of an adapter alone.

The trained model stays as it is. To merge in place and to take it back changes weights in bf16, each time. Here a
weight is gathered whole with the matrices of its adapters, which are small, and what is added is computed on it as PEFT
computes it on one process, so that the result is bitwise equal. DoRA needs whole rows anyway.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedSettingError

_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Merge:
    """What one adapter adds to a weight or a bias."""

    scaling: float
    kind: str = "linear"
    """`linear`, `embedding`, or `bias`."""
    is_transposed: bool = False
    """The weight has its inputs in rows, as `Conv1D` of transformers has."""
    has_magnitude: bool = False
    """DoRA."""

    @property
    def num_inputs(self) -> int:
        """The number of tensors of the adapter."""
        return 1 if self.kind == "bias" else 2 + self.has_magnitude

    def into(self, weight: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Return the weight with what the adapter adds."""
        if self.kind == "bias":
            return (weight + inputs[0] * self.scaling).to(weight.dtype)
        a, b = inputs[0], inputs[1]
        in_fp32 = a.device.type == "cpu" and a.dtype in (torch.float16, torch.bfloat16)
        product = (b.float() @ a.float()) if in_fp32 else b @ a
        transposes = self.is_transposed or self.kind == "embedding"
        delta = ((product.T if transposes else product) * self.scaling).to(a.dtype)
        if not self.has_magnitude:
            return (weight + delta).to(weight.dtype)
        merged = weight + delta
        by_outputs = merged.T if transposes else merged
        norm = torch.linalg.norm(by_outputs, dim=1).to(merged.dtype)
        factor = (inputs[2].flatten() / norm)[:, None]
        scaled: Tensor = (factor.T if transposes else factor) * merged
        return scaled.to(weight.dtype)


@dataclass(frozen=True)
class Recipe:
    """A tensor of the base model, from tensors of the model with adapters."""

    inputs: tuple[str, ...]
    merges: tuple[Merge, ...] = ()

    def compute(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the tensor."""
        result, *rest = tensors
        for merge in self.merges:
            result = merge.into(result, rest[: merge.num_inputs])
            rest = rest[merge.num_inputs :]
        return result


def base_of(model: nn.Module) -> nn.Module:
    """Return the model inside of PEFT's."""
    peft_model: Any = model
    inside: nn.Module = peft_model.get_base_model()
    return inside


def merged_recipes(model: nn.Module, names: Iterable[str]) -> dict[str, Recipe]:
    """Return how each tensor of the base model is made, with all active adapters; `names` are those of this process."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    present = set(names)
    recipes: dict[str, Recipe] = {}
    used: set[str] = set()
    for path, module in model.named_modules():
        found: dict[str, Recipe] = {}
        if isinstance(module, ModulesToSaveWrapper):
            found = _saved_module(path, module, present)
        elif isinstance(module, AuxiliaryTrainingWrapper) or (
            isinstance(module, BaseTunerLayer) and not isinstance(module, LoraLayer)
        ):
            _refuse(path, module, "only plain LoRA and DoRA are merged while weights are handed over.")
        elif isinstance(module, LoraLayer):
            found = _merged_layer(path, module, present)
        else:
            continue
        recipes |= found
        used |= {name for name in present if name.startswith(f"{path}.")}
    plain = {name: Recipe((name,)) for name in present - used}
    made = {**plain, **recipes}
    outside = [name for name in made if not name.startswith(_PREFIX)]
    if outside:
        raise UnsupportedSettingError(
            f"accelerator.weights() with {outside[0]}",
            "it is a tensor of the adapter that belongs to no layer of the model (prompt tuning?).",
            "Hand over the adapter alone: accelerator.weights(model, adapter='only').",
        )
    order = {name: place for place, name in enumerate(names)}
    ordered = sorted(made.items(), key=lambda item: min(order[name] for name in item[1].inputs))
    return {name.removeprefix(_PREFIX): recipe for name, recipe in ordered}


def _refuse(path: str, module: nn.Module, reason: str) -> None:
    raise UnsupportedSettingError(
        f"accelerator.weights() with {path}, a {type(module).__name__} of PEFT",
        reason,
        "Hand over the adapter alone: accelerator.weights(model, adapter='only').",
    )


def _saved_module(path: str, module: Any, present: set[str]) -> dict[str, Recipe]:
    """Return the tensors of a module that an adapter replaces."""
    active = list(module.active_adapters)
    if len(active) > 1:
        _refuse(path, module, f"several adapters ({', '.join(active)}) replace it.")
    inside = f"{path}.modules_to_save.{active[0]}." if active else f"{path}.original_module."
    return {f"{path}.{name[len(inside) :]}": Recipe((name,)) for name in present if name.startswith(inside)}


def _merged_layer(path: str, layer: Any, present: set[str]) -> dict[str, Recipe]:
    """Return the tensors of a layer with its active adapters."""
    base = layer.get_base_layer()
    if not isinstance(base, (nn.Embedding, nn.Linear)) and type(base).__name__ != "Conv1D":
        _refuse(path, layer, f"adapters of a {type(base).__name__} are not merged while weights are handed over.")
    if layer.disable_adapters:
        _refuse(path, layer, "its adapters are turned off, and a merged model would have them.")
    weights, biases = [f"{path}.base_layer.weight"], [f"{path}.base_layer.bias"]
    merges: list[Merge] = []
    merges_of_bias: list[Merge] = []
    for name in layer.active_adapters:
        if name not in layer.scaling or name in layer.merged_adapters:
            continue
        parts, merge = _merge(path, layer, name, present, is_embedding=isinstance(base, nn.Embedding))
        if parts[0] in present:  # else it does not adapt this layer
            weights += parts
            merges.append(merge)
        if f"{path}.lora_B.{name}.bias" in present:
            merges_of_bias.append(Merge(merge.scaling, "bias"))
            biases.append(f"{path}.lora_B.{name}.bias")
    made = {
        f"{path}.weight": Recipe(tuple(weights), tuple(merges)),
        f"{path}.bias": Recipe(tuple(biases), tuple(merges_of_bias)),
    }
    return {name: recipe for name, recipe in made.items() if recipe.inputs[0] in present}


def _merge(path: str, layer: Any, name: str, present: set[str], *, is_embedding: bool) -> tuple[list[str], Merge]:
    """Return what one adapter adds to the weight of a layer, and the names of its tensors."""
    if is_embedding:
        parts = [f"{path}.lora_embedding_A.{name}", f"{path}.lora_embedding_B.{name}"]
    else:
        parts = [f"{path}.lora_A.{name}.weight", f"{path}.lora_B.{name}.weight"]
    magnitude = f"{path}.lora_magnitude_vector.{name}.weight"
    has_magnitude = magnitude in present
    variant = getattr(layer, "lora_variant", {}).get(name)
    if variant is not None and not (has_magnitude and type(variant).__name__.startswith("Dora")):
        _refuse(path, layer, f"its variant {type(variant).__name__} is not merged while weights are handed over.")
    kind = "embedding" if is_embedding else "linear"
    transposes = bool(getattr(layer, "fan_in_fan_out", False))
    merge = Merge(float(layer.scaling[name]), kind, transposes, has_magnitude)
    return [*parts, magnitude] if has_magnitude else parts, merge


def adapter_recipes(model: nn.Module, forms: dict[str, Tensor], adapter: str) -> dict[str, Recipe]:
    """Return the tensors of an adapter under the names in its file. `forms` are tensors on the meta device."""
    from peft import get_peft_model_state_dict

    chosen = get_peft_model_state_dict(model, state_dict=forms, adapter_name=adapter)
    names = {id(tensor): name for name, tensor in forms.items()}
    changed = [name for name, tensor in chosen.items() if id(tensor) not in names]
    if changed:
        raise UnsupportedSettingError(
            f"accelerator.weights(model, adapter='only') with {changed[0]}",
            "PEFT does not save this tensor as it is in the model.",
            "Save the adapter with PEFT, on a model that is not spread.",
        )
    return {name: Recipe((names[id(tensor)],)) for name, tensor in chosen.items()}


def active_adapter(model: nn.Module) -> str:
    """Return the name of the one adapter that is active."""
    adapters: list[str] = list(model.active_adapters) if is_peft(model) else []  # type: ignore[arg-type]
    if len(adapters) == 1:
        return adapters[0]
    raise UnsupportedSettingError(
        f"accelerator.weights(model, adapter='only') with a {type(model).__name__}",
        f"{len(adapters)} adapters of PEFT are active in it, and the files of an adapter hold one.",
        "Activate one: model.set_adapter(name)." if adapters else "Leave adapter out.",
    )


def is_peft(model: nn.Module) -> bool:
    """Return whether a model is one of PEFT, without importing it."""
    kind = getattr(sys.modules.get("peft"), "PeftModel", None)
    return kind is not None and isinstance(model, kind)
