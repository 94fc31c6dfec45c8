"""Recompute the activations of a model's blocks in the backward pass, instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ....errors import UnsupportedSettingError
from ..wrapping import blocks_in_lists


def recompute_activations(
    model: nn.Module,
    *,
    keep: Sequence[OpOverload] = (),
    offload: bool = False,
    block_classes: Sequence[str] | None = None,
) -> nn.Module:
    """Recompute the blocks of a model in the backward pass; return the model. Call it before `prepare`.

    Only the inputs of blocks are kept. Results are bitwise equal, dropout included.

    Args:
        model: A model with repeated blocks.
        keep: Operators whose outputs are kept, because they take long: `[torch.ops.aten.mm.default]`.
        offload: Whether the inputs of blocks are kept on the host.
        block_classes: The names of the blocks' classes. Without it, those that the model names
            (`_no_split_modules`), or modules of one class in a `ModuleList` or `Sequential`.
    """
    if keep and offload:
        raise UnsupportedSettingError(
            "recompute_activations(keep=..., offload=True)",
            "torch keeps the outputs of operators on the device.",
            "Leave one out.",
        )
    if getattr(model, "is_gradient_checkpointing", False):
        raise UnsupportedSettingError(
            "recompute_activations after gradient_checkpointing_enable()",
            "the model recomputes its blocks already.",
            "Leave one out.",
        )
    blocks = _outermost_blocks(model, block_classes)
    for block in blocks:
        refuse_recomputed(block, "recompute_activations")
    for block in blocks:
        block.forward = CheckpointedForward(block.forward, offload=offload, keep=keep)
    return model


def refuse_recomputed(block: nn.Module, setting: str) -> None:
    """Refuse to recompute a block that is recomputed already: it would run three times."""
    if isinstance(block.forward, CheckpointedForward):
        raise UnsupportedSettingError(
            setting, f"{type(block).__name__} is recomputed already.", "Ask for it once: here, or in the FSDP plugin."
        )


def _outermost_blocks(model: nn.Module, block_classes: Sequence[str] | None) -> list[nn.Module]:
    names = block_classes or getattr(model, "_no_split_modules", None)
    found = [each for each in model.modules() if type(each).__name__ in names] if names else blocks_in_lists(model)
    inside = {id(part) for block in found for part in block.modules() if part is not block}
    blocks = list({id(block): block for block in found if id(block) not in inside}.values())
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} has no blocks {f'of the classes {list(names)}' if names else 'in a list'}: name "
            "the classes of its blocks by block_classes."
        )
    return blocks


class CheckpointedForward:
    """An activation-checkpointed forward pass: saves its inputs, on the host if `offload`, and outputs of `keep`."""

    def __init__(self, forward: Callable[..., Any], *, offload: bool, keep: Sequence[OpOverload] = ()) -> None:
        self.forward = forward
        self.keep = list(keep)
        self.offload = offload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass."""
        if self.keep:
            contexts = partial(create_selective_checkpoint_contexts, self.keep)
            return checkpoint(self.forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        if not self.offload:
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
        # torch saves positional inputs only. Masks and positions are not offloaded: the units share them.
        moved = {name: value for name, value in kwargs.items() if isinstance(value, Tensor) and value.requires_grad}
        kept = {name: value for name, value in kwargs.items() if name not in moved}
        count, names = len(args), tuple(moved)  # the function lives until the backward pass, and must not hold tensors

        def forward(*values: Any) -> Any:
            return self.forward(*values[:count], **dict(zip(names, values[count:], strict=True)), **kept)

        # Around the checkpoint, not inside it, where the intermediate activations would be saved as well.
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.accelerator.is_available()):
            return checkpoint(forward, *args, *moved.values(), use_reentrant=False)
