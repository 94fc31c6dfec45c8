"""Attention over sequences whose positions are on several processes.

[Note: one meaning, three ways] Attention here has the meaning that it has on one process. Plain causal attention goes
through torch's ring where torch has one for the device. Everything else sees all keys in the order of the sequence:
either this process's queries and the keys of all processes (context parallelism), or all queries and keys of some heads
(Ulysses). Masks, documents and windows are therefore those of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ....errors import UnsupportedSettingError
from .documents import CAUSAL, Documents, Piece, Reach, Row
from .exchange import from_heads, gathered, gathered_keys, to_heads
from .sharding import Sharding

# Not by the name that is replaced while sequences are sharded.
_sdpa: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention


@dataclass(frozen=True)
class Scoring:
    """How attention computes and uses its scores."""

    scale: float | None = None
    dropout: float = 0.0
    softcap: float | None = None
    sinks: Tensor | None = None
    """For each head the score of a key that has no value."""

    def of_heads(self, part: int, parts: int) -> Scoring:
        """Return the scoring of some heads."""
        if self.sinks is None:
            return self
        return Scoring(self.scale, self.dropout, self.softcap, self.sinks.chunk(parts)[part])


class Probe(Protocol):
    """What stands in for attention while a model is checked."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return something for each query that depends on its own position only."""

    def refuse(self, reason: str, remedy: str) -> None:
        """Take note of a call that cannot be carried."""


class ShardedAttention:
    """Attention for one division of sequences over processes."""

    def __init__(
        self, sharding: Sharding, group: Any, setting: str, *, by_heads: bool, ring: Callable[..., Tensor] | None = None
    ) -> None:
        """Take torch's ring attention, if there is one; `setting` names the axis in errors."""
        self.sharding = sharding
        self.group = group
        self.setting = setting
        self.by_heads = by_heads
        self.ring = ring if sharding.is_head_tail else None
        self.probe: Probe | None = None
        self._one_document = Documents(sharding.length, [Row((0,))])

    # --- what models call ---------------------------------------------------------------------------------------------

    def sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Stand in for `torch.nn.functional.scaled_dot_product_attention`."""
        scoring = Scoring(scale, dropout_p)
        if attn_mask is not None:
            return self.masked(query, key, value, attn_mask, scoring)
        return self.within(query, key, value, CAUSAL if is_causal else Reach(), None, scoring)

    def within(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        reach: Reach,
        documents: Documents | None,
        scoring: Scoring,
    ) -> Tensor:
        """Attend within documents and a reach; without documents every sequence is one."""
        if not self._accepts(query, key):
            return self._probed(query, key, value)
        documents = documents or self._one_document
        is_usual = scoring.sinks is None and scoring.softcap is None
        if self.ring is not None and reach == CAUSAL and documents.is_plain and is_usual:
            options = {"dropout_p": scoring.dropout, "is_causal": True, "scale": scoring.scale}
            return self.ring(query, key, value, **options, enable_gqa=query.shape[1] != key.shape[1])
        own = None if self.by_heads else self.sharding.own

        def attend(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
            parts = [
                _by_pieces(query[rows], key[rows], value[rows], pieces, scoring)
                for rows, pieces in documents.plan(own, reach, query.device)
            ]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return self._joined(query, key, value, scoring, attend)

    def masked(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
        """Attend where a mask says so: a boolean one, or one that is added to the scores."""
        whole = self._whole_mask(mask)
        if whole is None or not self._accepts(query, key):
            return self._probed(query, key, value)

        def attend(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
            own = whole
            if self.by_heads and own.shape[1] > 1:
                own = own.chunk(len(self.sharding.sizes), dim=1)[self.sharding.rank]
            return _attend(query, key, value, own, False, scoring)

        return self._joined(query, key, value, scoring, attend)

    # --- exchange -----------------------------------------------------------------------------------------------------

    def _joined(
        self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, attend: Callable[..., Tensor]
    ) -> Tensor:
        """Attend with the keys of all processes."""
        if not self.by_heads:
            return attend(query, *gathered_keys(key, value, self.sharding, self.group), scoring)
        scoring = scoring.of_heads(self.sharding.rank, len(self.sharding.sizes))
        output = attend(*to_heads(query, key, value, self.sharding, self.group), scoring)
        return from_heads(output, self.sharding, self.group)

    def _accepts(self, query: Tensor, key: Tensor) -> bool:
        """Refuse queries and keys that are not the sharded sequence; return False while a model is checked."""
        own, size = self.sharding.own_length, len(self.sharding.sizes)
        if query.dim() != 4 or key.dim() != 4:
            self.refuse(
                f"attention is called with {query.dim()} dimensions.", "Use [batch, heads, positions, width] for it."
            )
        elif {query.shape[2], key.shape[2]} != {own}:
            self.refuse(
                f"attention is called with {query.shape[2]} queries and {key.shape[2]} keys, and this process has "
                f"{own} of the {self.sharding.length} positions of each sequence.",
                "Only attention of the divided sequences to themselves is joined: no cross-attention, no cache, no "
                "second sequence, and no batch that was not divided.",
            )
        elif self.by_heads and query.shape[1] % size:
            self.refuse(
                f"Ulysses gives every process an equal number of heads, and here are {query.shape[1]} for {size}.",
                "Choose an sp_size that divides the heads (with tp_size, those of a process), or use cp_size.",
            )
        return self.probe is None

    def _whole_mask(self, mask: Tensor) -> Tensor | None:
        """Return a mask for the queries that are computed here and for all keys; None if it has been refused."""
        own, length = self.sharding.own_length, self.sharding.length
        mask = mask[(None,) * (4 - mask.dim())]
        rows, columns = mask.shape[-2:]
        if columns == own and rows == 1:
            mask, columns = gathered(mask, 3, self.sharding, self.group), length
        if columns != length or rows not in (1, own, length):
            self.refuse(
                f"a mask of {rows} x {columns} is given to attention, and this process has {own} of the {length} "
                "positions of each sequence: which keys its columns stand for is not known.",
                f"Make the mask for the whole sequence ({length} x {length}), and give it to maybe_context_parallel "
                "with the dimension of its rows; or give a mask of keys, with one row.",
            )
            return None
        if self.by_heads and rows == own:
            return gathered(mask, 2, self.sharding, self.group)
        if not self.by_heads and rows == length:
            return self.sharding.part_of(mask, 2)
        return mask

    # --- checks -------------------------------------------------------------------------------------------------------

    def refuse(self, reason: str, remedy: str) -> None:
        """Refuse a call of attention; while a model is checked, take note of it."""
        if self.probe is None:
            raise UnsupportedSettingError(self.setting, reason, remedy)
        self.probe.refuse(reason, remedy)

    def _probed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert self.probe is not None
        return self.probe.attend(query, key, value)


def _by_pieces(query: Tensor, key: Tensor, value: Tensor, pieces: list[Piece], scoring: Scoring) -> Tensor:
    """Attend piece by piece; queries without a key get zeros."""
    outputs, at = [], 0
    for queries, keys, mask, is_causal in pieces:
        if queries.start > at:
            outputs.append(_zeros(query, value, queries.start - at))
        outputs.append(_attend(query[:, :, queries], key[:, :, keys], value[:, :, keys], mask, is_causal, scoring))
        at = queries.stop
    if at < query.shape[2]:
        outputs.append(_zeros(query, value, query.shape[2] - at))
    if not pieces:  # the other processes wait for the gradients of this one
        outputs.append((query.sum() + key.sum() + value.sum()).expand(*query.shape[:2], 0, value.shape[-1]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _zeros(query: Tensor, value: Tensor, count: int) -> Tensor:
    return query.new_zeros(*query.shape[:2], count, value.shape[-1])


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scoring: Scoring
) -> Tensor:
    """Attend by torch's kernels, or written out where they lack something."""
    groups = query.shape[1] // key.shape[1]
    if scoring.sinks is None and scoring.softcap is None:
        if groups > 1 and mask is not None:  # torch has fast kernels for grouped heads without a mask only
            key, value, groups = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), 1
        return _sdpa(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=scoring.dropout,
            is_causal=is_causal,
            scale=scoring.scale,
            enable_gqa=groups > 1,
        )
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return _written_out(query, key, value, mask, is_causal, scoring)


def _written_out(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scoring: Scoring
) -> Tensor:
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale)
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., : key.shape[2]].to(value.dtype)
    return torch.dropout(weights, scoring.dropout, True) @ value
