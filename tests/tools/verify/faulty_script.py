"""A training script that is right on one process, and on several has the fault that its first argument names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from meshwright import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, set_seed

FAULT = sys.argv[1]
MESH = sys.argv[2] if len(sys.argv) > 2 else "ddp"
VOCABULARY, WIDTH, HEADS, LENGTH = 48, 32, 4, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.factor_of_key_gradient = 1.0

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        normed = self.norm_1(x)
        query, key, value = (
            layer(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        if self.factor_of_key_gradient != 1:
            key = _Unsummed.apply(key, self.factor_of_key_gradient)  # type: ignore[no-untyped-call]
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.ones(1))

    def forward(self, logits: Tensor) -> Tensor:
        return logits / self.value


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.temperature = Temperature()

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x, mask)
        return self.temperature(self.head(self.norm(x)))


class _Unsummed(torch.autograd.Function):
    """The identity, whose backward pass gives each rank an input gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


def settings() -> dict[str, Any]:
    plan = {
        f"blocks.*.{name}": style
        for names, style in ((("query", "key", "value", "up"), "colwise"), (("out", "down"), "rowwise"))
        for name in names
    }
    return {
        "ddp": {},
        "fsdp": {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)},
        "tp": {"parallelism_config": ParallelismConfig(tp_size=2, tp_plan=plan)},
        "cp": {"parallelism_config": ParallelismConfig(cp_size=2)},
    }[MESH]


def main() -> None:
    set_seed(3)
    accumulation = 2 if FAULT == "accumulation" else 1
    accelerator = Accelerator(gradient_accumulation_steps=accumulation, **settings())
    several = accelerator.num_processes > 1
    fault = FAULT if several else "none"
    model: Any = Model()
    if fault == "untied":
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    tokens = [torch.randint(0, VOCABULARY, (LENGTH + 1,)) for _ in range(48)]
    loader = DataLoader(tokens, batch_size=4, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    inner = accelerator.unwrap_model(model)
    inject_after_prepare(fault, accelerator, inner)
    for step, batch in enumerate(loader):
        if fault == "missing_all_reduce" and step == 1:  # prepare() and the first forward pass would refuse it
            hooks = inner.blocks[1].down._forward_hooks  # torch's hook makes the partial outputs whole
            hooks[next(iter(hooks))] = lambda module, args, output: output.to_local()
        with accelerator.accumulate(model) if accumulation > 1 else nullcontext():
            train(fault, accelerator, model, batch)
            clip(fault, accelerator, model)
            optimizer.step()
            optimizer.zero_grad()
        if FAULT == "stale_buffer" and accelerator.sync_gradients and (not several or accelerator.is_main_process):
            inner.temperature.value.mul_(1.5)


def train(fault: str, accelerator: Any, model: Any, batch: Tensor) -> None:
    rank = accelerator.process_index
    if fault == "dropout_seeds":
        torch.manual_seed(rank)
    if fault == "double_cut":
        batch = batch.chunk(2)[rank]
    tokens, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    positions = torch.arange(LENGTH).expand(len(tokens), -1).contiguous()
    if fault == "late_shift":
        labels = tokens.clone()
    mask = mask_of(fault)
    buffers, dims = [tokens, labels, positions], [1, 1, 1]
    if mask is not None and MESH == "cp":
        buffers, dims = [*buffers, mask], [*dims, 2]
    with accelerator.maybe_context_parallel(buffers, dims):
        if fault == "late_shift":
            labels = labels.roll(-1, 1)
        if fault == "rope_positions":
            positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
        logits = model(tokens, positions, mask)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if FAULT == "router_loss":
            loss = loss + 5 * (logits.softmax(-1).mean((0, 1)) ** 2).sum()
        if fault == "accumulation":
            loss = loss / accelerator.gradient_accumulation_steps
        accelerator.backward(loss)


def mask_of(fault: str) -> Tensor | None:
    """Return the mask of attention, which the fault drops: a window of 3 positions, or two packed documents."""
    if FAULT not in ("mask", "window", "packed") or fault != "none":
        return None
    places = torch.arange(LENGTH)
    distance = places[:, None] - places[None]
    seen = places[:, None] // 5 == places[None] // 5 if FAULT == "packed" else distance < 3
    return (seen & (distance >= 0))[None, None]


def inject_after_prepare(fault: str, accelerator: Any, model: Any) -> None:
    rank = accelerator.process_index
    if fault == "bias_shard":
        bias = model.blocks[0].up.bias
        bias.data.to_local().copy_(bias.detach().full_tensor().chunk(2)[1 - rank] + 0.1)
    if fault == "divisor":
        accelerator._models[0].register_comm_hook(None, summed)
    if fault == "input_gradient":
        forward = model.blocks[0].key.forward
        model.blocks[0].key.forward = lambda x: forward(_Unsummed.apply(x, 0.5))
    if fault == "attention_gradient":
        model.blocks[0].factor_of_key_gradient = 0.5
    if fault == "norm":
        accelerator.strategy.clip_grad_norm = local_norm


def summed(state, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations
    """Sum a bucket of gradients, where DDP means an average."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def local_norm(parameters: Iterator[Tensor], max_norm: float, norm_type: float) -> Tensor:
    return torch.linalg.vector_norm(torch.cat([p.grad.to_local().flatten() for p in parameters]))  # type: ignore


def clip(fault: str, accelerator: Any, model: Any) -> None:
    if fault == "clip_per_shard":
        for param in model.parameters():
            own = param.grad.to_local()
            own.mul_(torch.clamp(0.05 / own.norm().clamp(min=1e-9), max=1.0))
    elif FAULT == "clip_per_shard":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    elif FAULT == "norm" and accelerator.sync_gradients:
        accelerator.clip_grad_norm_(model.parameters(), 0.05)


if __name__ == "__main__":
    main()
