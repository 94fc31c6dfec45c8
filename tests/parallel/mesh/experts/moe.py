"""A small language model with experts in plain torch, and one training run beside one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright import Accelerator, ParallelismConfig
from tests.parallel.beside_one_process import difference
from tests.parallel.small_transformer import LENGTH, VOCABULARY, WIDTH, Block, loss_of

EXPERTS, CHOICES = 8, 2
EP_PLAN = {"blocks.*.experts": "experts"}
TP_PLAN = {
    "blocks.*.query": "colwise",
    "blocks.*.key": "colwise",
    "blocks.*.value": "colwise",
    "blocks.*.out": "rowwise",
}


class Experts(nn.Module):
    """MLPs whose weights are in one parameter each."""

    def __init__(self, num_experts: int = EXPERTS) -> None:
        super().__init__()
        self.up = nn.Parameter(0.3 * torch.randn(num_experts, WIDTH, 2 * WIDTH))
        self.up_bias = nn.Parameter(0.1 * torch.randn(num_experts, 2 * WIDTH))
        self.down = nn.Parameter(0.3 * torch.randn(num_experts, 2 * WIDTH, WIDTH))

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of what a token's experts return."""
        output = torch.zeros_like(tokens)
        for expert in index.unique().tolist():
            row, column = torch.where(index == expert)
            hidden = F.gelu(tokens[row] @ self.up[expert] + self.up_bias[expert])
            output = output.index_add(0, row, hidden @ self.down[expert] * weights[row, column, None])
        return output


class MoeBlock(Block):
    """Attention, and experts that a router chooses; `skewed` sends all tokens to the first experts."""

    def __init__(self, num_experts: int = EXPERTS, *, skewed: bool = False) -> None:
        super().__init__()
        del self.up, self.down
        self.router = nn.Linear(WIDTH, num_experts)
        self.experts = Experts(num_experts)
        if skewed:
            with torch.no_grad():
                self.router.bias[:CHOICES] += 100.0

    def forward(self, x: Tensor) -> Tensor:
        """Return the next hidden state."""
        normed = self.norm1(x)
        heads = [
            layer(normed).unflatten(-1, (-1, WIDTH // 4)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        tokens = self.norm2(x).flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(CHOICES)
        return x + self.experts(tokens, index, weights / weights.sum(-1, keepdim=True)).view_as(x)


class MoeTransformer(nn.Module):
    """Embeddings, two blocks with experts, and a head."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(2 * LENGTH, WIDTH)
        self.blocks = nn.ModuleList(MoeBlock(**options) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the logits."""
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def model(**options: Any) -> MoeTransformer:
    """Make the same model every time."""
    torch.manual_seed(0)
    return MoeTransformer(**options)


def mesh(**sizes: Any) -> ParallelismConfig:
    """Return the config of a mesh for this model."""
    return ParallelismConfig(ep_plan=EP_PLAN, tp_plan=TP_PLAN if "tp_size" in sizes else None, **sizes)


def batch_of(seed: int, samples: int = 8) -> tuple[Tensor, Tensor]:
    """Return the inputs and the targets of a global batch."""
    text = torch.randint(0, VOCABULARY, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def own_loss(accelerator: Accelerator, net: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Run both passes on this process's part of a global batch, and return its loss."""
    shares, share = accelerator.strategy.num_data_ranks, accelerator.strategy.data_rank
    inputs, targets = inputs.chunk(shares)[share].clone(), targets.chunk(shares)[share].clone()
    positions = torch.arange(LENGTH).expand_as(inputs).contiguous()
    everything = [inputs, targets, positions]
    with accelerator.maybe_context_parallel(
        buffers=everything, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(everything)
    ):
        loss = loss_of(net(inputs, positions), targets)
        accelerator.backward(loss)
    return loss.detach()


def off_by(
    sizes: dict[str, int],
    *,
    steps: int = 2,
    micro_batches: int = 1,
    options: dict[str, Any] | None = None,
    **others: Any,
) -> dict[str, float]:
    """Train beside one process; return the largest differences of losses, gradients, norms and parameters."""
    if "cp_size" in sizes:
        from ..context import cpu_attention

        cpu_attention.register()
    accelerator = Accelerator(
        cpu=True, parallelism_config=mesh(**sizes), gradient_accumulation_steps=micro_batches, **others
    )
    net = model(**(options or {}))
    alone = copy.deepcopy(net)
    by_itself = torch.optim.SGD(alone.parameters(), lr=0.1)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    worst = dict.fromkeys(("loss", "gradients", "norm", "parameters"), 0.0)

    def note(name: str, one: Any, other: Any) -> None:
        worst[name] = max(worst[name], difference(one, other))

    for step in range(steps):
        for micro_batch in range(micro_batches):
            inputs, targets = batch_of(step * micro_batches + micro_batch)
            wanted = loss_of(alone(inputs, torch.arange(LENGTH).expand_as(inputs)), targets)
            (wanted / micro_batches).backward()
            with accelerator.accumulate(net):
                loss = own_loss(accelerator, net, inputs, targets)
            note("loss", accelerator.reduce(loss, "mean"), wanted)
        expected = dict(alone.named_parameters())
        for name, param in net.named_parameters():
            note("gradients", param.grad, expected[name].grad)
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        note("norm", accelerator.clip_grad_norm_(net.parameters(), 0.5), norm)
        for each in (optimizer, by_itself):
            each.step()
            each.zero_grad()
        for name, param in net.named_parameters():
            note("parameters", param, expected[name])
    return worst
