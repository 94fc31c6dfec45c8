"""Check that a model is compatible with context parallelism.

[Note: independent positions] Every process holds some positions of each sequence, and torch connects them only in
`scaled_dot_product_attention`. Everything else that a model computes at a position must depend only on the inputs at
that position. Otherwise results are silently wrong: attention without that function sees only a shard of the sequence;
a model that counts positions counts those of its shard; a loss that shifts labels compares the ends of two chunks that
are not adjacent. Forward passes in which every position attends only to itself reveal all of this. If the inputs at
some positions change, the outputs at the others must not (`require_no_mixing`). If the positions are reversed, the
outputs must be reversed and a loss unchanged (`require_no_order`). Three such passes, without gradients, run before the
first forward pass on sharded sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from ....errors import UnsupportedSettingError
from ....runtime.collectives.nested import named_leaves, recursively_apply, tensors_of
from ...modules.dtensors import whole
from .attention import ShardedAttention

SplitBuffers = Sequence[tuple[Tensor, int]]
"""Sharded tensors, each with its sequence dimension."""
Outputs = list[tuple[str, Tensor]]
Pairs = list[tuple[str, Tensor, Tensor]]


class PositionCheck:
    """Check a model before its first forward pass on sharded sequences, and again for other arguments."""

    def __init__(
        self,
        model: nn.Module,
        setting: str,
        sharded: Callable[[], tuple[SplitBuffers | None, ShardedAttention | None]],
        group: dist.ProcessGroup | None,
    ) -> None:
        """Register the check; `sharded` returns the sharded buffers and the attention that joins them.

        Errors are raised on the whole group, and name the setting.
        """
        self._setting = setting
        self._sharded = sharded
        self._group = group
        self._checked: set[tuple[str, ...]] = set()
        check = torch.compiler.disable(self.check)  # type: ignore[no-untyped-call]
        model.register_forward_pre_hook(check, prepend=True, with_kwargs=True)

    def check(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Check the model if its inputs are sharded; a pipeline calls this itself."""
        buffers, attention = self._sharded()
        if not buffers or attention is None:
            return
        given = tuple(name for name, leaf in named_leaves((args, kwargs)) if leaf is not None)
        if given not in self._checked:
            self._checked.add(given)  # first, because the check calls the model
            name = f"{self._setting} with {_name_of(model)}"
            self._raise_on_all_ranks(
                lambda: require_independent_positions(model, args, kwargs, buffers, attention, name)
            )

    def _raise_on_all_ranks(self, check: Callable[[], None]) -> None:
        """Raise the error of one process on all of them, because each checked its own data."""
        found: tuple[str, str, str] | None = None
        try:
            check()
        except UnsupportedSettingError as refusal:
            found = (refusal.setting, refusal.reason, refusal.remedy)
        everywhere: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everywhere, found, group=self._group)
        for found in filter(None, everywhere):
            raise UnsupportedSettingError(*found)


def require_independent_positions(
    model: nn.Module, args: Any, kwargs: Any, buffers: SplitBuffers, attention: ShardedAttention, setting: str
) -> None:
    """Refuse a model whose results would differ on sharded sequences. See [Note: independent positions]."""
    call = (args, kwargs)
    if not any(_dim_of(leaf, buffers) is not None for leaf in tensors_of(call)):
        return
    first, dim = buffers[0]
    own = torch.arange(first.shape[dim], device=first.device)
    later = own[len(own) // 2 :]

    def outputs_at(positions: Tensor) -> Outputs:
        chosen = recursively_apply(lambda leaf: _at(leaf, _dim_of(leaf, buffers), positions), call)
        outputs = named_leaves(model(*chosen[0], **chosen[1]))
        return [(name, whole(leaf)) for name, leaf in outputs if isinstance(leaf, Tensor) and leaf.is_floating_point()]

    probe = _DiagonalAttention()
    with _dry_run(model), _probed(attention, probe):
        plain = outputs_at(own)
        mixed = outputs_at(torch.cat([own[-1:].repeat(len(own) - len(later)), later]))
        reversed_ = outputs_at(own.flip(0))
    if probe.refusals:
        raise UnsupportedSettingError(setting, *probe.refusals[0])
    rounding = 5e-2 if probe.is_half_precision else 1e-3
    sequence = (dim, len(own))
    require_no_mixing(setting, _paired_outputs(plain, mixed, later, later, sequence), rounding)
    require_no_order(setting, _paired_outputs(plain, reversed_, own.flip(0), own, sequence), rounding)


def require_no_mixing(setting: str, pairs: Pairs, rounding: float) -> None:
    """Refuse a model if outputs changed at positions whose inputs did not."""
    for name, before, after in pairs:
        if before.dim() and _deviation(before, after) > rounding:
            raise UnsupportedSettingError(
                setting,
                f"its output{name} at one position depends on other positions, and not by way of torch's "
                "scaled_dot_product_attention, the only place where the parts of a sequence are joined.",
                'Use attention that goes through it (attn_implementation="sdpa" in transformers), and no convolution, '
                "recurrence or pooling over the sequence.",
            )


def require_no_order(setting: str, pairs: Pairs, rounding: float) -> None:
    """Refuse a model if outputs changed with the order of the positions."""
    noise = 0.0
    for name, before, after in sorted(pairs, key=lambda pair: -pair[1].dim()):
        deviation = _deviation(before, after)
        if before.dim() and deviation > rounding:
            raise UnsupportedSettingError(
                setting,
                f"its output{name} depends on where a position stands in this process's part of a sequence: it counts "
                "positions by itself.",
                "Give it the positions (position_ids=... in transformers), and give them to maybe_context_parallel "
                "with the inputs.",
            )
        # A shift changes the mean over many labels only slightly, so the tolerance is as small as the format allows.
        if before.dim() == 0 and deviation > noise + (2**-7 if _has_16_bits(before) else 1e-5):
            raise UnsupportedSettingError(
                setting,
                f"its output{name} depends on the order of the positions, as a loss does for which the model shifts "
                "the labels, and neighbours may be on different processes.",
                "Shift the labels before they are cut, and give them to maybe_context_parallel with the inputs; a "
                "model of transformers takes them as shift_labels=... beside labels=....",
            )
        noise = max(noise, deviation)


def _name_of(model: nn.Module) -> str:
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule)).__name__  # FSDP2 has its own


def _dim_of(leaf: Tensor, buffers: SplitBuffers) -> int | None:
    """Return the sequence dimension of an input; tensors computed from a sharded one have the same dimension."""
    for tensor, dim in buffers:
        if tensor is leaf:
            return dim
    tensor, dim = buffers[0]
    return dim if leaf.dim() > dim and leaf.shape[dim] == tensor.shape[dim] else None


def _at(tensor: Tensor, dim: int | None, positions: Tensor, length: int | None = None) -> Tensor:
    """Select positions of a tensor; a dimension may hold several sequences of a length, concatenated."""
    if dim is None:
        return tensor
    length = length or tensor.shape[dim]
    sequences = tensor.reshape(*tensor.shape[:dim], -1, length, *tensor.shape[dim + 1 :])
    return sequences.index_select(dim + 1, positions.to(tensor.device)).flatten(dim, dim + 1)


def _paired_outputs(
    some: Outputs, others: Outputs, at_some: Tensor, at_others: Tensor, sequence: tuple[int, int]
) -> Pairs:
    """Pair the outputs of two passes at these positions; `sequence` is the inputs' sequence dimension and length."""
    dim, length = sequence
    pairs = []
    for (name, one), (_, other) in zip(some, others, strict=True):
        sizes = list(one.shape)
        own = dim if len(sizes) > dim and sizes[dim] == length else None
        if own is None:  # flattened with the batch, or pooled
            own = next((at for at, size in enumerate(sizes) if size and size % length == 0), None)
        pairs.append((name, _at(one, own, at_some, length), _at(other, own, at_others, length)))
    return pairs


def _has_16_bits(number: Tensor) -> bool:
    """Return whether a number fits into 16 bits, whatever its dtype."""
    return any(bool(number.to(dtype).to(number.dtype) == number) for dtype in (torch.bfloat16, torch.float16))


def _deviation(one: Tensor, other: Tensor) -> float:
    """Return the largest difference relative to the largest value; 0 for NaN."""
    return float(((one - other).abs().max() / one.abs().max().clamp(min=1e-30)).nan_to_num(0.0))


@contextmanager
def _dry_run(model: nn.Module) -> Iterator[None]:
    """Run a model without gradients, dropout or compilation, and restore its state."""
    modes = [(module, module.training) for module in model.modules()]
    generator = torch.get_rng_state()
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.set_rng_state(generator)
        for module, training in modes:
            module.training = training


@contextmanager
def _probed(attention: ShardedAttention, probe: _DiagonalAttention) -> Iterator[None]:
    before, attention.probe = attention.probe, probe
    try:
        with probe:
            yield
    finally:
        attention.probe = before


class _DiagonalAttention(TorchFunctionMode):
    """Replace attention over sharded sequences: every position attends only to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.refusals: list[tuple[str, str]] = []
        """Reasons and remedies of calls of attention that cannot be carried."""
        self.is_half_precision = False
        """Whether anything is computed in 16 bits."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and note its precision."""
        result = func(*args, **(kwargs or {}))
        self.is_half_precision |= isinstance(result, Tensor) and result.dtype in (torch.float16, torch.bfloat16)
        return result

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return for each query its own value, with something of its query and key, which may hold positions."""
        if self.refusals:
            return query.new_zeros(*query.shape[:-1], value.shape[-1])
        key, value = (heads.repeat_interleave(query.shape[1] // heads.shape[1], 1) for heads in (key, value))
        return value + (query + key).sum(-1, keepdim=True)

    def refuse(self, reason: str, remedy: str) -> None:
        """Take note of a call that cannot be carried."""
        self.refusals.append((reason, remedy))
