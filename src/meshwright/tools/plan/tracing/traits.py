"""Note what a script uses of an Accelerator, and what it sets in its code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ....accelerator import Accelerator
from ....config.settings import TrainingSettings
from ..trace import Traits

_SETTINGS = ("gradient_accumulation_steps", "gradient_accumulation_plugin", "parallelism_config", "fsdp_plugin")
_TRAIT_OF_METHOD = {
    "maybe_context_parallel": "splits_sequences",
    "forward_backward": "forwards_backwards",
}


def watch_traits(traits: Traits) -> None:
    """Note which methods the script calls, and which arguments it gives."""
    plain_init = Accelerator.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = tuple(name for name in _SETTINGS if kwargs.get(name) not in (None, 1))
        traits.in_code = tuple(dict.fromkeys((*traits.in_code, *given)))
        plain_init(self, *args, **kwargs)

    def noted(plain: Callable[..., Any], trait: str) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            setattr(traits, trait, True)
            return plain(*args, **kwargs)

        return method

    Accelerator.__init__ = init  # type: ignore[method-assign]
    for name, trait in _TRAIT_OF_METHOD.items():
        setattr(Accelerator, name, noted(getattr(Accelerator, name), trait))


def note_traits(traits: Traits, settings: TrainingSettings, models: Sequence[nn.Module]) -> None:
    """Note how models are sharded, and whether and by which numbers their layers can be split."""
    if settings.sharding is not None:
        traits.reshards = bool(settings.sharding.reshard_after_forward)
        traits.recomputes = bool(settings.sharding.activation_checkpointing)
        traits.offloads = bool(settings.sharding.offloads)
    mesh = settings.parallelism
    for model in models:
        own = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
        traits.has_tp_plan |= bool(own or (mesh is not None and mesh.tp_plan))
        config = getattr(model, "config", None)
        heads = [getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")]
        traits.heads += tuple(count for count in heads if isinstance(count, int))
