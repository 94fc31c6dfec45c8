"""Build models of transformers with few layers and smaller widths: what is verified is how they are distributed."""

from __future__ import annotations

import sys
from typing import Any

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")
_WIDTHS = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_SCALED = ("intermediate_size", "moe_intermediate_size", "n_inner", "d_ff")
_LEAST_WIDTH = 64


def shrink_transformers(processes: int) -> None:
    """Make transformers build small models with random weights; heads stay divisible by the number of processes."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return
    base = transformers.PreTrainedModel
    plain_init, layers = base.__init__, max(2, processes)

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        shrink(config, layers, processes)
        plain_init(self, config, *args, **kwargs)

    def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("config") or cls.config_class.from_pretrained(name)
        attention = kwargs.get("attn_implementation")
        return cls._from_config(config, **({} if attention is None else {"attn_implementation": attention}))

    base.__init__ = init
    base.from_pretrained = classmethod(from_pretrained)


def shrink(config: Any, layers: int, processes: int) -> None:
    """Reduce the layers and widths of a config, and of those inside it."""
    for part in vars(config).values():
        if hasattr(part, "to_diff_dict"):  # the config of a tower
            shrink(part, layers, processes)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        layers = max(layers, len(set(kinds)))
        first_of_each = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
        chosen = sorted([*first_of_each, *[i for i in range(len(kinds)) if i not in first_of_each]][:layers])
        config.layer_types = [kinds[i] for i in chosen]
    for name in _LAYERS:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(getattr(config, name), layers))
    factor = _factor(config, processes)
    if factor > 1:
        _divide_widths(config, factor)


def _factor(config: Any, processes: int) -> int:
    """Return the power of two by which widths can be divided."""
    width, heads = _first(config, _WIDTHS), _first(config, _HEADS)
    if width is None or heads is None:
        return 1
    factor = 1
    while width // (2 * factor) >= _LEAST_WIDTH and heads % (2 * factor * processes) == 0:
        factor *= 2
    return factor


def _divide_widths(config: Any, factor: int) -> None:
    for name in (*_WIDTHS, *_HEADS, *_SCALED):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, getattr(config, name) // factor)
    heads, shared = _first(config, _HEADS), getattr(config, "num_key_value_heads", None)
    if isinstance(shared, int) and heads is not None and (shared > heads or heads % shared):
        config.num_key_value_heads = heads


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)
