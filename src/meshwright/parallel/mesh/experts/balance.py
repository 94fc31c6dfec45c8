"""How evenly tokens are spread over experts: the counts, and the loss over the tokens of all processes.

[Note: the router's loss] The loss that balances experts is experts x sum(share of tokens x mean probability) over the
experts. It is a product of means: its mean over processes, which each have their own tokens, is not the loss of the
global batch. The share of tokens has no gradient, and the probabilities enter linearly. So with the shares of all
processes, each process's probabilities give terms whose mean is exactly the loss of the global batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .dispatch import SpreadForward


def expert_counts(spread: Iterable[SpreadForward], device: torch.device) -> dict[str, Tensor]:
    """Return how many tokens each expert got in training since the last call, over all processes. Collective."""
    counts = {}
    for forward in spread:
        none = torch.zeros(forward.num_experts, dtype=torch.long, device=device)
        counts[forward.name] = none if forward.counts is None else forward.counts
        forward.counts = None
    if counts:
        everything = torch.cat(list(counts.values()))
        dist.all_reduce(everything)
        parts = torch.split(everything.cpu(), [len(count) for count in counts.values()])
        counts = dict(zip(counts, parts, strict=True))
    return counts


def load_balancing_loss(
    router_logits: Tensor | Sequence[Tensor], top_k: int, mask: Tensor | None, *, shares: int, group: Any
) -> Tensor:
    """Return this process's share of the loss; the mean over `shares` processes is that of the global batch."""
    layers = [router_logits] if isinstance(router_logits, Tensor) else list(router_logits)
    count = layers[0].shape[-1]
    chosen = layers[0].new_zeros(count + 1, dtype=torch.float32)  # the last one counts the tokens
    probabilities = layers[0].new_zeros(count, dtype=torch.float32)
    for logits in layers:
        each = logits.float().reshape(-1, count).softmax(-1)
        weights = each.new_ones(len(each)) if mask is None else mask.reshape(-1).to(each)
        with torch.no_grad():
            hits = torch.zeros_like(each).scatter_(1, each.topk(top_k).indices, 1.0)
            chosen += torch.cat([weights @ hits, weights.sum().view(1)])
        probabilities = probabilities + weights @ each
    if shares > 1:
        dist.all_reduce(chosen, group=group)
    tokens = chosen[-1].clamp(min=1.0)
    return count * shares * ((chosen[:-1] / tokens) * (probabilities / tokens)).sum()
