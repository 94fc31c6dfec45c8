"""A small language model and its training loop, as a user writes it. Arguments choose how it is distributed."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from meshwright import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    PipelineConfig,
    linear_cross_entropy,
    recompute_activations,
    step_in_backward,
)

WIDTH, HEADS, VOCABULARY, LENGTH = 256, 8, 2048, 128
PLAN = {"blocks.*.query": "colwise", "blocks.*.key": "colwise", "blocks.*.value": "colwise", "blocks.*.out": "rowwise",
        "blocks.*.up": "colwise", "blocks.*.down": "rowwise"}  # fmt: skip


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        size = WIDTH // HEADS
        query, key, value = (
            layer(normed).unflatten(-1, (-1, size)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.feed_forward_norm(x))))


class Model(nn.Module):
    """A decoder."""

    def __init__(self, layers: int, linear_loss: bool = False) -> None:
        super().__init__()
        self.linear_loss = linear_loss
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        if self.linear_loss:
            return linear_cross_entropy(x, self.head.weight, tokens, bias=self.head.bias)
        logits: Tensor = self.head(x)
        return logits


class Tokens(Dataset[Tensor]):
    """Random sequences."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean loss."""
    if logits.dim() == 0:
        return logits
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def arguments() -> argparse.Namespace:
    """Return how the model is distributed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--mixed_precision", default="no")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--levers", nargs="*", default=[], help="linear_loss recompute host_inputs in_backward offload")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--microbatches", type=int, default=4)
    for axis in ("dp_shard", "tp", "cp", "pp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    return parser.parse_args()


def accelerator_of(args: argparse.Namespace) -> Accelerator:
    """Return the accelerator of one way to distribute the model."""
    sizes = {f"{axis}_size": getattr(args, axis) for axis in ("dp_shard", "tp", "cp", "pp")}
    options: dict[str, Any] = {}
    if any(size > 1 for size in sizes.values()):
        if args.tp > 1:
            options["tp_plan"] = PLAN
        if args.pp > 1:
            options["pp_handler"] = PipelineConfig(schedule=args.schedule, microbatches=args.microbatches)
        options = {"parallelism_config": ParallelismConfig(**sizes, **options)}
        if args.recompute:
            options["fsdp_plugin"] = FullyShardedDataParallelPlugin(activation_checkpointing=True)
    return Accelerator(
        cpu=True,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.accumulation,
        offload="host" if "offload" in args.levers else None,
        **options,
    )


def main() -> None:
    """Train for some steps."""
    args = arguments()
    accelerator = accelerator_of(args)
    model: Any = Model(args.layers, linear_loss="linear_loss" in args.levers)
    if "recompute" in args.levers or "host_inputs" in args.levers:
        recompute_activations(model, offload="host_inputs" in args.levers)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    if "in_backward" in args.levers:
        step_in_backward(optimizer)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Tokens(), batch_size=args.batch_size))
    for batch, tokens in enumerate(loader):
        with accelerator.accumulate(model), accelerator.maybe_context_parallel(buffers=[tokens], buffer_seq_dims=[1]):
            if args.pp > 1:
                loss = accelerator.forward_backward(model, tokens, target=tokens, loss_fn=loss_of)
            else:
                loss = loss_of(model(tokens), tokens)
                accelerator.backward(loss)
            if "in_backward" not in args.levers:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        print("loss", loss.item())
        if batch + 1 == args.steps * args.accumulation:
            break


if __name__ == "__main__":
    main()
