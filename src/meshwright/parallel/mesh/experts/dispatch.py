"""Send tokens to the processes that hold their experts, and the results back.

[Note: what travels] Every process keeps its own samples. A module with experts is called with tokens, the experts that
the router chose for each and their weights. For each pair of a token and one of its experts the token is sent to the
process that holds the expert, by one all-to-all; that process runs its part of the module on what it received, with one
expert per token and a weight of 1; a second all-to-all returns the results, which are weighted and summed here. The
module's output must therefore be the sum over a token's experts of weight x expert(token): the first pass checks this.

[Note: shared tokens] Processes along the tp axis hold the same tokens. Each of them sends its part of them, so that an
expert sees a token once, and the parts of the output are joined. Gradients of the inputs are joined likewise.

[Note: the divisor] The gradient of an expert is the sum over the tokens of all processes. FSDP2 divides it by the
number of processes that hold the same experts, and it must be the number of processes with different tokens. The factor
between them is applied to the gradients of the results as they arrive, and taken from those of the tokens as they
leave.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ....errors import UnsupportedSettingError
from ...modules.dtensors import local, mesh_of

_SAMPLES = 4


@dataclass(frozen=True, kw_only=True)
class TokenExchange:
    """Where tokens travel: over the processes that share all experts; `tp` holds the same tokens several times."""

    ep: DeviceMesh
    tp: DeviceMesh | None
    factor: float
    """Of the experts' gradients. See [Note: the divisor]."""


class SpreadForward:
    """The forward pass of a module whose experts are spread over processes."""

    def __init__(self, name: str, module: nn.Module, num_experts: int, exchange: TokenExchange) -> None:
        self.name = name
        self.kind = type(module).__name__  # FSDP2 changes the class
        self.module = module
        self.num_experts = num_experts
        self.exchange = exchange
        self.forward: Callable[..., Tensor] = module.forward
        self.dtype: torch.dtype | None = None
        """What parameters are cast to for computing; None where FSDP2 casts them."""
        self.counts: Tensor | None = None
        """Tokens that this process has sent to each expert in training since the last request."""
        self._parameters = list(inspect.signature(module.forward).parameters)[:3]
        self._is_checked = False
        self._call = torch.compiler.disable(self._spread)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output for this process's tokens."""
        output: Tensor = self._call(*args, **kwargs)
        return output

    def _spread(self, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(self._parameters, args, strict=False)) | kwargs
        if len(given) != 3 or len(args) > 3:
            raise TypeError(
                f"{self.name} holds experts that are spread, and is called as (hidden_states, top_k_index, "
                f"top_k_weights); it was called with {', '.join(given) or 'nothing'}."
            )
        hidden, index, weights = (given[name] for name in self._parameters)
        tokens = hidden.reshape(-1, hidden.shape[-1])
        index, weights = index.reshape(len(tokens), -1), weights.reshape(len(tokens), -1)
        tp = self.exchange.tp
        if tp is None:
            output = self._through_experts(tokens, index, weights)
        else:
            part = [_own_part(tensor, tp) for tensor in (tokens, index, weights)]
            output = _joined(self._through_experts(*part), tokens.shape, tp)
        # Not a view: FSDP2 must see that the output is changed in place.
        return output if tp is None and hidden.dim() == 2 else output.view(hidden.shape).clone()

    def _through_experts(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Send every token to its experts, and return the weighted sums of what they return."""
        ep, (count, choices) = self.exchange.ep, index.shape
        group = ep.get_group()
        chosen = index.reshape(-1)
        sent = torch.zeros(self.num_experts, dtype=torch.long, device=tokens.device)
        sent.scatter_add_(0, chosen, torch.ones_like(chosen))
        self._count(sent)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        by_rank = torch.stack([sent, received]).view(2, ep.size(), -1)
        sizes = by_rank.sum(2).tolist()
        order = chosen.argsort(stable=True)  # by expert, and so by process: each holds neighbours
        factor = self.exchange.factor
        arrived = _Exchanged.apply(tokens[order // choices], *sizes, group, 1 / factor)  # type: ignore[no-untyped-call]
        experts = torch.arange(by_rank.shape[2], device=tokens.device).repeat(ep.size())
        mine = experts.repeat_interleave(by_rank[1].reshape(-1), output_size=len(arrived))
        with local_parameters(self.module, self.dtype):
            if not self._is_checked and len(tokens):
                self._require_weighted_sum(tokens, weights.dtype)
            results = self._run(arrived, mine)
        returned = _Exchanged.apply(results, *reversed(sizes), group, factor)  # type: ignore[no-untyped-call]
        in_order = torch.empty_like(order)
        in_order[order] = torch.arange(len(order), device=order.device)
        by_token: Tensor = returned[in_order].view(count, choices, -1)
        return (by_token * weights.unsqueeze(-1)).sum(1).to(tokens.dtype)

    def _run(self, tokens: Tensor, experts: Tensor) -> Tensor:
        """Run this process's experts, each on its tokens."""
        if len(tokens):
            ones = torch.ones(len(tokens), 1, dtype=tokens.dtype, device=tokens.device)
            return self.forward(tokens, experts.unsqueeze(1), ones).to(tokens.dtype)
        # Every process takes part in the exchanges of the backward pass, and every parameter has a gradient.
        nothing = torch.stack([param.reshape(-1)[:0].sum() for param in self.module.parameters()])
        return tokens + nothing.sum().to(tokens.dtype)

    def _count(self, sent: Tensor) -> None:
        # Checkpointed blocks run again in the backward pass.
        if self.module.training and torch._C._current_graph_task_id() == -1:
            self.counts = sent.clone() if self.counts is None else self.counts.add_(sent)

    @torch.no_grad()
    def _require_weighted_sum(self, tokens: Tensor, dtype: torch.dtype) -> None:
        """Refuse a module whose output is not the sum of weight x expert(token)."""
        self._is_checked = True
        tokens = tokens[:_SAMPLES]
        held = self.num_experts // self.exchange.ep.size()
        first = torch.arange(len(tokens), device=tokens.device) % held
        index = torch.stack([first, (first + 1) % held], 1)[:, :held]
        weights = torch.linspace(0.2, 0.9, index.numel(), dtype=dtype, device=tokens.device).view(index.shape)
        training = self.module.training
        self.module.eval()  # dropout would differ
        try:
            both = self.forward(tokens, index, weights)
            each = [self._run(tokens, column) * weights[:, i : i + 1] for i, column in enumerate(index.unbind(1))]
        finally:
            self.module.train(training)
        off_by = (both - sum(each)).abs().max() / both.abs().max().clamp(min=1e-30)
        halves = (torch.float16, torch.bfloat16)
        is_half = both.dtype in halves or tokens.dtype in halves or torch.is_autocast_enabled(tokens.device.type)
        if both.shape != tokens.shape or float(off_by.nan_to_num(0.0)) > (5e-2 if is_half else 1e-3):
            raise UnsupportedSettingError(
                f"ep_size > 1 with {self.name}, a {self.kind},",
                "its output for a token is not the sum over the token's experts of weight x expert(token), which is "
                "what is computed where experts are spread.",
                "Weight and sum the outputs of the experts, or leave the module out of ep_plan.",
            )


class _Exchanged(torch.autograd.Function):
    """An all-to-all of rows; the backward pass returns the gradients, multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any, factor: float) -> Tensor:
        ctx.way_back = (received, sent, group)
        ctx.factor = factor
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        returned = _exchanged(gradient, *ctx.way_back)
        return returned if ctx.factor == 1 else returned.mul_(ctx.factor), None, None, None, None


def _exchanged(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=group)
    return arrived


def _own_part(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this process's part of rows that all processes hold; the backward pass joins the gradients."""
    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(0)]).to_local()


def _joined(part: Tensor, shape: torch.Size, mesh: DeviceMesh) -> Tensor:
    """Join the parts of all processes."""
    spread = DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1))
    return spread.redistribute(placements=[Replicate()]).to_local()


@contextmanager
def local_parameters(module: nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Give a module the slices that this process holds of its parameters, as plain tensors."""
    held = [
        (owner._parameters, name, param)
        for owner in module.modules()
        for name, param in owner._parameters.items()
        if param is not None and mesh_of(param) is not None
    ]
    try:
        for parameters, name, param in held:
            own = local(param)
            parameters[name] = own if dtype is None else own.to(dtype)  # type: ignore[assignment]
        yield
    finally:
        for parameters, name, param in held:
            parameters[name] = param
