"""What trains the same model with less memory, one line of a script each: the levers that an estimate traces.

A lever is applied to the traced program as a script would apply it, so its memory is that of the code which runs then.
Only the 8-bit optimizer has a stand-in, because its kernels read memory: it makes the state that bitsandbytes makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...parallel.modules.memory.losses import linear_cross_entropy

RECOMPUTE = "recompute blocks"
HOST_INPUTS = "recompute blocks, inputs on the host"
LINEAR_LOSS = "loss without logits"
IN_BACKWARD = "optimizer in the backward pass"
EIGHT_BITS = "8-bit moments"
STREAMED = "blocks on the host"

_BLOCK = 256
_SMALLEST = 4096
"""Of bitsandbytes 0.50: values that share a scale, and parameters that have fewer elements keep fp32 moments."""


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """One line that saves memory."""

    name: str
    line: str
    """How it is written in a script, or set at the launch."""
    objection: Callable[[Any], str | None] = lambda program: None
    """Returns why a program cannot have it; None if it can."""


def _no_replicas(program: Any) -> str | None:
    return "DDP averages gradients when all are there" if program.processes > 1 and not program.fsdp else None


def _no_shards(program: Any) -> str | None:
    return "FSDP shards the state" if program.fsdp else None


def _has_head(program: Any) -> str | None:
    labels = program.batch is not None and "labels" in program.batch.kwargs
    return None if labels and head_of(program.model) is not None else "it is for language models that get labels"


LEVERS = (
    Suggestion(name=RECOMPUTE, line="recompute_activations(model)"),
    Suggestion(name=HOST_INPUTS, line="recompute_activations(model, offload=True)"),
    Suggestion(name=LINEAR_LOSS, line="linear_cross_entropy(hidden, head.weight, labels)", objection=_has_head),
    Suggestion(name=IN_BACKWARD, line="step_in_backward(optimizer)", objection=_no_replicas),
    Suggestion(name=EIGHT_BITS, line="bitsandbytes.optim.AdamW8bit(...)", objection=_no_shards),
    Suggestion(name=STREAMED, line='Accelerator(offload="host"), or "disk"', objection=_no_shards),
)


def head_of(model: nn.Module) -> nn.Module | None:
    """Return the head of a language model of transformers, which computes logits; None for other models."""
    find: Any = getattr(model, "get_output_embeddings", None)
    head: nn.Module | None = None if find is None or getattr(model, "base_model", model) is model else find()
    return head if hasattr(head, "weight") else None


def loss_without_logits(model: nn.Module) -> nn.Module:
    """Let a language model of transformers return its loss only, from the hidden states and the weight of its head."""
    head: Any = head_of(model)
    inside: Any = model.base_model

    def forward(labels: Tensor, **inputs: Any) -> dict[str, Tensor]:
        hidden = inside(**inputs)[0]
        bias = getattr(head, "bias", None)
        return {"loss": linear_cross_entropy(hidden[:, :-1], head.weight, labels[:, 1:], bias=bias)}

    model.forward = forward
    return model


class EightBitAdam(torch.optim.Optimizer):
    """The memory of bitsandbytes' AdamW8bit: two bytes per element, and scales; no lists of temporaries."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make the state, and change the parameters in place."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    if not self.state[param]:
                        self.state[param].update(_moments(param))
                    param.add_(param.grad, alpha=-1e-3)


def _moments(param: Tensor) -> Mapping[str, Tensor]:
    if param.numel() < _SMALLEST:
        return {name: torch.zeros_like(param, dtype=torch.float32) for name in ("state1", "state2")}
    moments = {name: torch.zeros_like(param, dtype=torch.uint8) for name in ("state1", "state2")}
    scales = -(-param.numel() // _BLOCK)
    return moments | {name: param.new_zeros(scales, dtype=torch.float32) for name in ("absmax1", "absmax2")}
