"""Models of transformers: attention over sharded sequences through its own registries of attention and masks.

[Note: a mask by number] transformers builds masks from the positions of one process, which are some of the sequence.
Our mask function builds none. It returns the reach of the mask, and the number of the call whose documents apply, as a
small tensor that the model hands to its layers; the attention function reads them there. A layer that is recomputed in
the backward pass gets the same tensor, and so the documents of its own call.

[Note: who keeps documents apart] Positions that start again mean documents only if a model gives its positions to the
mask functions of transformers, as most do; GPT-OSS does not. The check of a model reverses its positions, so that
transformers finds "documents" on every process if it looks for them: then the mask function has a part for them. Flash
attention reads the positions itself.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ....errors import UnsupportedSettingError
from ....errors.callers import warn
from .attention import Scoring, ShardedAttention
from .documents import CAUSAL, Documents, Reach, documents_of
from .exchange import gathered

NAME = "accelerate_sharded_sequences"
_KEPT_CALLS = 64
_COMPARED = 256
"""Positions for which a mask function is evaluated, to compare it with what was read from it."""
_ALL = -1


class ShardedCalls:
    """The calls of models of transformers while sequences are sharded."""

    def __init__(self, attention: ShardedAttention, keeps_apart: dict[int, bool]) -> None:
        """Take by config, from its `id`, whether documents are kept apart. See [Note: who keeps documents apart]."""
        self.attention = attention
        self.keeps_apart = keeps_apart
        self._documents: dict[int, Documents] = {}
        self._count = 0
        self._is_inside = False
        self._asked_for_cache = False

    def begin(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Read the documents of a call, and return its arguments without a cache of keys and values."""
        parameters = inspect.signature(model.forward).parameters
        given = dict(zip(parameters, args, strict=False)) | kwargs
        self._count += 1
        self._documents[self._count] = self._documents_of(given)
        self._documents.pop(self._count - _KEPT_CALLS, None)
        self._is_inside = True
        if "use_cache" not in parameters and not hasattr(model, "peft_config"):  # PEFT hands it on
            return kwargs
        asked = given.get("use_cache")
        self._asked_for_cache = bool(getattr(model.config, "use_cache", False) if asked is None else asked)
        return {**kwargs, "use_cache": False}

    def end(self) -> None:
        """Forget the current call."""
        self._is_inside = False

    def _documents_of(self, given: dict[str, Any]) -> Documents:
        sharding, group = self.attention.sharding, self.attention.group
        mask, positions, bounds = given.get("attention_mask"), given.get("position_ids"), given.get("cu_seq_lens_q")
        if self.attention.probe is not None or (isinstance(mask, Tensor) and mask.dim() != 2):
            return documents_of(None, None, sharding.length)
        if isinstance(mask, Tensor):
            if mask.shape[1] != sharding.length:
                mask = gathered(mask, 1, sharding, group)
            return documents_of(None, mask, sharding.length)
        if isinstance(bounds, Tensor):
            return self._documents_between(bounds)
        if isinstance(positions, Tensor) and positions.dim() <= 3:
            positions = positions[0] if positions.dim() == 3 else positions.reshape(-1, positions.shape[-1])
            return documents_of(gathered(positions, 1, sharding, group), None, sharding.length)
        return documents_of(None, None, sharding.length)

    def _documents_between(self, bounds: Tensor) -> Documents:
        length = self.attention.sharding.length
        edges = bounds.flatten().tolist()
        if edges[0] != 0 or edges[-1] != length:
            raise UnsupportedSettingError(
                f"{self.attention.setting} with cu_seq_lens_q from {edges[0]} to {edges[-1]}",
                f"they are the bounds of the documents in a whole sequence, which has {length} positions.",
                "Do not divide them, and concatenate the documents of a batch into one sequence.",
            )
        positions = torch.cat([torch.arange(stop - start) for start, stop in pairwise(edges)])
        return documents_of(positions[None], None, length)

    def mask(self, reach: Reach, config: Any, finds_documents: bool) -> Tensor:
        """Return the number of the current call and the reach as a tensor. See [Note: a mask by number]."""
        if not self._is_inside:
            raise UnsupportedSettingError(
                f"{self.attention.setting} with a part of a prepared model",
                "the documents and the padding of a batch are read where the prepared model is called.",
                "Call the model that prepare returned.",
            )
        if self.attention.probe is not None:
            self.keeps_apart[id(config)] = self.keeps_apart.get(id(config), False) or finds_documents
        apart = reach.after == 0 and self.keeps_apart.get(id(config), True)  # never apart without a causal mask
        if apart and self._asked_for_cache and self._documents[self._count].has_several:
            _warn_of_cache()
        return torch.tensor([self._count, apart, *(_ALL if steps is None else steps for steps in reach)])

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor | None:
        """Attend as a mask of ours says, or as one that the script has made; None without a mask."""
        if mask is None:
            return None
        if mask.dim() != 1:
            return self.attention.masked(query, key, value, mask, scoring)
        number, apart, *steps = mask.tolist()
        reach = Reach(*(None if step == _ALL else step for step in steps))
        documents = self._documents.get(number)
        if documents is None:
            raise UnsupportedSettingError(
                f"{self.attention.setting} with a layer that is recomputed late",
                f"more than {_KEPT_CALLS} calls of models lie between its forward and its backward pass.",
                "Run the backward pass earlier, and inside maybe_context_parallel.",
            )
        if not apart and documents.has_several:
            documents = documents.joined
        return self.attention.within(query, key, value, reach, documents, scoring)


_current: ShardedCalls | None = None


def configs_of(model: nn.Module) -> list[Any]:
    """Return the configs of transformers in a model, the outermost first."""
    if "transformers" not in sys.modules:
        return []
    from transformers import PretrainedConfig

    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            found[id(config)] = config
    return list(found.values())


def require_attention_interface(model: nn.Module, setting: str) -> None:
    """Refuse a model that names its attention and computes it in a way of its own."""
    known = {id(config) for config in configs_of(model)}
    backends = ("_supports_sdpa", "_supports_flash_attn", "_supports_flash_attn_2", "_supports_flex_attn")
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        kind = getattr(config, "_attn_implementation", None)
        if not isinstance(kind, str) or kind == "sdpa":
            continue
        if id(config) in known and any(getattr(type(module), backend, True) for backend in backends):
            continue
        raise UnsupportedSettingError(
            f"{setting} with {type(module).__name__}",
            f"{name or 'it'} has attn_implementation={kind!r}, which would attend to one process's part of each "
            "sequence.",
            'Load the model with attn_implementation="sdpa"; a model without it, and without another attention of '
            "transformers, cannot be divided.",
        )


@contextmanager
def sharded_calls(
    attention: ShardedAttention, configs: list[Any], keeps_apart: dict[int, bool]
) -> Iterator[ShardedCalls]:
    """Let models with these configs attend to sharded sequences inside the context."""
    global _current
    if configs:
        _register()
    before, implementations = _current, [config._attn_implementation for config in configs]
    flash = [config for config, kind in zip(configs, implementations, strict=True) if "flash" in str(kind)]
    keeps_apart |= {id(config): True for config in flash}
    _current = calls = ShardedCalls(attention, keeps_apart)
    try:
        for config in configs:
            config._attn_implementation = NAME
        yield calls
    finally:
        _current = before
        for config, implementation in zip(configs, implementations, strict=True):
            config._attn_implementation = implementation


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    eager: Any = torch.compiler.disable  # here and not above, where it would import the compiler at once
    AttentionInterface.register(NAME, eager(_attention))
    AttentionMaskInterface.register(NAME, eager(_mask))


def _calls() -> ShardedCalls:
    if _current is None:
        raise RuntimeError(f"attn_implementation={NAME!r} is for sharded sequences only: meshwright sets it itself.")
    return _current


def _mask(*, mask_function: Callable[..., Any] | None = None, **given: Any) -> Tensor:
    """Stand in for a mask function of transformers."""
    calls = _calls()
    reach = CAUSAL if mask_function is None else _reach_of(mask_function)
    documents = [] if mask_function is None else [part for part in _leaves_of(mask_function) if _keeps_apart(part)]
    if reach is not None and mask_function is not None and calls.attention.probe is not None:
        count = min(given.get("kv_length", _COMPARED), _COMPARED)
        if not _says(mask_function, reach, documents, torch.arange(count, device=given.get("device"))):
            reach = None
    if reach is None:
        kind = type(given.get("config")).__name__.removesuffix("Config")
        raise UnsupportedSettingError(
            f"{calls.attention.setting} with {kind}",
            f"its attention has a mask of its own ({getattr(mask_function, '__qualname__', mask_function)}), made for "
            "the positions of one process; causal and bidirectional attention, windows, documents and padding are "
            "carried.",
            "Use cp_size=1 and sp_size=1 for it, or pass a 4-D attention_mask of the whole sequence.",
        )
    return calls.mask(reach, given.get("config"), bool(documents))


def _name_of(function: Callable[..., Any]) -> str:
    """Return the name of a mask function of transformers, or of the function that made it; "" for another function."""
    if getattr(function, "__module__", "") != "transformers.masking_utils":
        return ""
    return function.__qualname__.split(".")[0]


def _parts_of(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return the mask functions around which a function of transformers was made."""
    if not _name_of(function) or _name_of(function) in _REACHES:
        return []
    held = inspect.getclosurevars(function).nonlocals.values()
    return [part for one in held for part in (one if isinstance(one, (list, tuple)) else [one]) if callable(part)]


def _leaves_of(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return the mask functions that a mask function consists of in the end."""
    return [leaf for part in _parts_of(function) for leaf in _leaves_of(part)] or [function]


def _keeps_apart(function: Callable[..., Any]) -> bool:
    return _name_of(function) == "packed_sequence_mask_function"


def _reach_of(function: Callable[..., Any]) -> Reach | None:
    """Return the reach of a mask function of transformers, or None if it is another function.

    A function around a single mask function is taken to have its reach, whatever transformers calls it: the check of a
    model finds out whether that is so.
    """
    name = _name_of(function)
    if name in _REACHES:
        return _REACHES[name](inspect.getclosurevars(function).nonlocals.get("sliding_window", 0))
    parts = [_reach_of(part) for part in _parts_of(function)]
    if not parts or None in parts or (len(parts) > 1 and name != "and_masks"):
        return None
    return Reach(*(min((s for s in steps if s is not None), default=None) for steps in zip(*parts, strict=True)))


def _says(function: Callable[..., Any], reach: Reach, documents: list[Callable[..., Any]], positions: Tensor) -> bool:
    """Return whether a mask function says what was read from it, for these positions of this process."""
    queries, keys = positions[:, None], positions
    wanted = reach.sees(queries, keys)
    for document in documents:
        wanted &= document(0, 0, queries, keys)
    return bool((function(0, 0, queries, keys) == wanted).all())


_REACHES: dict[str, Callable[[int], Reach]] = {
    "causal_mask_function": lambda window: CAUSAL,
    "bidirectional_mask_function": lambda window: Reach(),
    "packed_sequence_mask_function": lambda window: Reach(),  # from the positions of this process: ours replace it
    "sliding_window_overlay": lambda window: Reach(before=window - 1),
    "sliding_window_bidirectional_overlay": lambda window: Reach(window, window),
}


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Stand in for an attention function of transformers."""
    calls = _calls()
    learned = [name for name, value in others.items() if isinstance(value, Tensor) and value.requires_grad]
    if learned:
        calls.attention.refuse(
            f"{type(module).__name__} gives its attention {', '.join(learned)}, made for the positions of one process.",
            "Use cp_size=1 and sp_size=1 for it.",
        )
    scoring = Scoring(scaling, dropout, softcap, s_aux)
    output = calls.attend(query, key, value, attention_mask, scoring)
    if output is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        output = calls.attention.within(query, key, value, CAUSAL if causal else Reach(), None, scoring)
    return output.transpose(1, 2).contiguous(), None


_warned = False


def _warn_of_cache() -> None:
    global _warned
    if not _warned:
        _warned = True
        warn(
            "Positions that start again mark documents, which do not attend to each other here. On one process "
            "transformers keeps documents apart only without a cache of keys and values: pass use_cache=False."
        )
